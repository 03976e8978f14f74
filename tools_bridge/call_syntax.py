"""How each family of models writes calls, for grammars: what stands around the arguments, and how those
are written themselves. Parsers take more than this; a grammar holds a model to what it was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Style = Literal["json", "qwen_xml", "glm_xml", "deepseek_xml", "deepseek_v4_1_xml", "kimi_k3_xml", "gemma"]
"""xgrammar's names for ways to write an object by its schema."""

NUMBER = "[0-9]{1,3}"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """`begin(name)`, a number if it is followed by `numbered`, the arguments, `end`. Calls stand between
    `opening` and `closing`, with `separator` between them.

    `trigger`: where it comes in a text, a call (or the section) begins. `alone`: one call ends the turn.
    """

    begin: Callable[[str], str]
    end: str
    trigger: str
    style: Style = "json"
    opening: str = ""
    closing: str = ""
    separator: str = ""
    numbered: str = ""
    alone: bool = False


@dataclass(frozen=True, slots=True)
class ReplySyntax:
    """What stands around the parts of a reply besides calls. `said`: around content that has a form.

    `between`: behind reasoning that is not the end of it all.
    """

    calls: CallSyntax
    think: tuple[str, str] | None = ("<think>", "</think>")
    between: str = ""
    said: tuple[str, str] = ("", "")


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


HERMES = CallSyntax(
    begin=lambda name: f'<tool_call>\n{{"name": {_quoted(name)}, "arguments": ',
    end="}\n</tool_call>",
    trigger="<tool_call>",
    separator="\n",
)
QWEN_XML = CallSyntax(
    begin=lambda name: f"<tool_call>\n<function={name}>\n",
    end="</function>\n</tool_call>",
    trigger="<tool_call>",
    style="qwen_xml",
    separator="\n",
)
GLM = CallSyntax(
    begin=lambda name: f"<tool_call>{name}",
    end="</tool_call>",
    trigger="<tool_call>",
    style="glm_xml",
)
GLM_LINES = CallSyntax(
    begin=lambda name: f"<tool_call>{name}\n",
    end="</tool_call>",
    trigger="<tool_call>",
    style="glm_xml",
    separator="\n",
)
LLAMA = CallSyntax(
    begin=lambda name: f'{{"name": {_quoted(name)}, "parameters": ',
    end="}",
    trigger='{"name": ',
    separator="; ",
)
MISTRAL = CallSyntax(
    begin=lambda name: f"[TOOL_CALLS]{name}[ARGS]",
    end="",
    trigger="[TOOL_CALLS]",
)
MISTRAL_ARRAY = CallSyntax(
    begin=lambda name: f'{{"name": {_quoted(name)}, "arguments": ',
    end="}",
    trigger="[TOOL_CALLS]",
    opening="[TOOL_CALLS] [",
    closing="]",
    separator=", ",
)
DEEPSEEK_V3 = CallSyntax(
    begin=lambda name: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    separator="\n",
)
DEEPSEEK_V31 = CallSyntax(
    begin=lambda name: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    trigger="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
)


def _dsml(word: str, style: Style, blank: str = "") -> CallSyntax:
    return CallSyntax(
        begin=lambda name: f'<｜DSML｜{blank}invoke name="{name}">\n',
        end=f"</｜DSML｜{blank}invoke>\n",
        trigger=f"<｜DSML｜{blank}{word}>",
        style=style,
        opening=f"<｜DSML｜{blank}{word}>\n",
        closing=f"</｜DSML｜{blank}{word}>",
    )


DEEPSEEK_V32 = _dsml("function_calls", "deepseek_xml")
DEEPSEEK_V4 = _dsml("tool_calls", "deepseek_xml")
DEEPSEEK_V41 = _dsml("calls", "deepseek_v4_1_xml", " ")
KIMI_K2 = CallSyntax(
    begin=lambda name: f"<|tool_call_begin|>functions.{name}:",
    end="<|tool_call_end|>",
    trigger="<|tool_calls_section_begin|>",
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    numbered="<|tool_call_argument_begin|>",
)
KIMI_K3 = CallSyntax(
    begin=lambda name: f'<|open|>call tool="{name}" index="',
    end="<|close|>call<|sep|>",
    trigger="<|close|>response<|sep|>",
    style="kimi_k3_xml",
    opening="<|close|>response<|sep|><|open|>tools<|sep|>",
    closing="<|close|>tools<|sep|>",
    numbered='"<|sep|>',
)
GEMMA = CallSyntax(
    begin=lambda name: f"<|tool_call>call:{name}",
    end="<tool_call|>",
    trigger="<|tool_call>",
    style="gemma",
)
HARMONY = CallSyntax(
    begin=lambda name: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    end="",
    trigger="<|channel|>commentary to=functions.",
    alone=True,
)

HARMONY_REPLY = ReplySyntax(
    HARMONY,
    think=("<|channel|>analysis<|message|>", "<|end|>"),
    between="<|start|>assistant",
    said=("<|channel|>final<|message|>", ""),
)
KIMI_K3_REPLY = ReplySyntax(
    KIMI_K3,
    think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    between="<|open|>response<|sep|>",
    said=("", "<|close|>response<|sep|>"),
)
HERMES_REPLY = ReplySyntax(HERMES)
