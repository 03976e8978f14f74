"""Tools, and compilers of grammars over a vocabulary of bytes."""

import os
import socket
import sys
from typing import Any

from agentserve.executor.matcher_process import Host
from tools_bridge.compiler import GrammarCompiler
from tools_bridge.grammar import ToolChoice
from tools_bridge.source_compiler import SourceCompiler
from tools_bridge.types import ToolSpec

EOS, VOCAB = 256, 300
BYTES = [bytes([i]) for i in range(256)]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = ToolSpec("weather", CITY)
NOW = ToolSpec("now")
REQUIRED = ToolChoice("required")
HOST_FD = 100


def call(name: str = "weather", arguments: str = '{"city": "Rome"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def sources_of_bytes() -> SourceCompiler:
    """In this process; of finished sources."""
    return SourceCompiler(BYTES, VOCAB, [EOS])


def compiler_of_bytes(**settings: Any) -> GrammarCompiler:
    return GrammarCompiler(BYTES, VOCAB, [EOS], **settings)


def fresh_host() -> Host:
    """A host as a worker has it: forked here, it would have all that the tests before have freed."""
    ours, theirs = socket.socketpair()
    code = "from socket import socket; from agentserve.executor import matcher_process as m"
    arguments = [sys.executable, "-c", f"{code}; m.run_host(socket(fileno={HOST_FD}))"]
    actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), HOST_FD)]
    pid = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=actions)
    theirs.close()
    return Host(ours, pid)


def chain(depth: int, among: str, letter: str = "#") -> str:
    """An EBNF whose rules repeat each other in as many ways as `among` has characters."""
    lines = [f'root ::= r{depth} "!"', f'r0 ::= "{letter}"+']
    for n in range(1, depth + 1):
        lines.append(f"r{n} ::= " + " | ".join(f'(r{n - 1} "{mark}"?)+' for mark in among))
    return "\n".join(lines)


def nest(depth: int, letter: str = "#", mark: str = "~") -> str:
    """A regular expression of repetitions in repetitions."""
    text = f"{letter}+"
    for _ in range(depth):
        text = f"(?:{text}{mark}?)+"
    return f"^{text}!$"
