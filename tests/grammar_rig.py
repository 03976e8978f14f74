"""Tools, and compilers of grammars over a vocabulary of bytes."""

from typing import Any

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


def call(name: str = "weather", arguments: str = '{"city": "Rome"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def sources_of_bytes() -> SourceCompiler:
    """In this process; of finished sources."""
    return SourceCompiler(BYTES, VOCAB, [EOS])


def compiler_of_bytes(**settings: Any) -> GrammarCompiler:
    return GrammarCompiler(BYTES, VOCAB, [EOS], **settings)


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
