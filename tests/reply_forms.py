"""How every family of models writes calls, and what could confuse its parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tools_bridge.registry import FAMILIES, ReplyForm, reply_form
from tools_bridge.types import ToolSpec

TOOLS = [
    ToolSpec(
        "f",
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
        },
    ),
    ToolSpec("g.h-2", {}),
]
NAMES = [family.name for family in FAMILIES]
ARGUMENTS: dict[str, Any] = {"a": 'x "y"\n\\ é😀', "n": -3, "o": {"k": [1, None, True, {"z": "}"}]}}


def form(name: str) -> ReplyForm:
    return reply_form("", name)


def quoted(value: Any) -> str:
    """Gemma's notation."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(quoted, value)) + "]"
    return json.dumps(value)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dsml(word: str, blank: str = "") -> Callable[[str, Any], str]:
    def write(name: str, arguments: Any) -> str:
        tag = f"｜DSML｜{blank}"
        inner = "".join(
            f'<{tag}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{plain(value)}</{tag}parameter>\n"
            for key, value in arguments.items()
        )
        return f'\n\n<{tag}{word}>\n<{tag}invoke name="{name}">\n{inner}</{tag}invoke>\n</{tag}{word}>'

    return write


def glm(line: str) -> Callable[[str, Any], str]:
    def write(name: str, arguments: Any) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{plain(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{line}{pairs}</tool_call>"

    return write


def qwen(name: str, arguments: Any) -> str:
    inner = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def xtml(name: str, arguments: Any) -> str:
    kinds = {str: "string", int: "number", dict: "object", list: "array"}
    tags = ((f'argument key="{k}" type="{kinds[type(v)]}"', plain(v)) for k, v in arguments.items())
    inner = "".join(f"<|open|>{tag}<|sep|>{value}<|close|>argument<|sep|>" for tag, value in tags)
    call = f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


WRITERS: dict[str, Callable[[str, Any], str]] = {
    "gpt-oss": lambda n, a: f" to=functions.{n}<|channel|>commentary <|constrain|>json<|message|>{plain(a)}",
    "kimi-k3": xtml,
    "kimi-k2": lambda n, a: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{plain(a)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek-v3": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{plain(a)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v31": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{plain(a)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v32": dsml("function_calls"),
    "deepseek-v4": dsml("tool_calls"),
    "deepseek-v41": dsml("calls", " "),
    "mistral": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{plain(a)}",
    "mistral-v3": lambda n, a: f"[TOOL_CALLS] [{plain({'name': n, 'arguments': a})}]",
    "gemma4": lambda n, a: f"<|tool_call>call:{n}{quoted(a)}<tool_call|>",
    "glm47": glm(""),
    "glm45": glm("\n"),
    "qwen3-xml": qwen,
    "hermes": lambda n, a: f"<tool_call>\n{plain({'name': n, 'arguments': a})}\n</tool_call>",
    "llama4": lambda n, a: f"[{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})]",
    "llama3": lambda n, a: plain({"name": n, "parameters": a}),
}


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def alphabet(name: str) -> list[str]:
    """Whatever could confuse a parser: the marks of its family, halves of them, and JSON."""
    call = WRITERS[name]("f", {"a": "b"})
    reply = form(name)
    marks = [*reply.markers, *((reply.think.open, reply.think.close) if reply.think else ())]
    marks += [*(reply.family.calls.triggers if reply.family.calls else ())]
    halves = [mark[: len(mark) // 2] for mark in marks]
    return [*marks, *halves, call, call[: len(call) // 2], call[len(call) // 2 :], *'{}[]",:f \n\\<>|a1']
