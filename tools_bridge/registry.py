"""The families of models by the form of their replies, and which of them a chat template is made for.

One rule says, for all of them, what clients see of a reply; how parsers keep it is in `tools_bridge.parser`:

- Every character of a reply is content, reasoning or a call's, and told in order, once; or it is one of the
  marks and control tokens of the form, or white space beside them, and dropped.
- What looks like a call and has no name is text, whole, as it was written. What has a name is a call, whole:
  nothing of it is content, be it malformed or cut. (What stands beside calls in the sections of Kimi, and
  what is addressed to tools in gpt-oss's and Kimi K3's replies, is no content in any case.)
- A call that is not malformed or cut has arguments that are a JSON object, no key of which comes twice. One
  that is: its name, what came of its arguments, and a finish reason other than "tool_calls".
- All of that is the same at every cut into pieces, streamed or not, in time linear in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tools_bridge import call_syntax
from tools_bridge.call_syntax import ReplySyntax
from tools_bridge.families import (
    deepseek,
    dsml,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    kimi_xtml,
    llama,
    mistral,
    pythonic,
    qwen_xml,
)
from tools_bridge.grammar import Thinking
from tools_bridge.parser import Asked, Calls, Program, ReplyParser, StepParser, Think, tagged
from tools_bridge.types import ToolSpec

THINK = Think("<think>", "</think>")
_MISTRAL = Think("[THINK]", "[/THINK]")
_GEMMA = Think("<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>"))
_XTML = Think("<|open|>think<|sep|>", "<|close|>think<|sep|>", kimi_xtml.MARKERS)

REASONING: dict[str, Think | None] = {"think": THINK, "mistral": _MISTRAL, "gemma": _GEMMA, "none": None}
"""The forms of reasoning that can be named; a family that has one of its own keeps it."""


@dataclass(frozen=True, slots=True)
class Family:
    """One form of replies.

    `signs`: a template with all the texts of one of these is made for it. `markers`: control tokens that
    are part of the form and say nothing by themselves. `ends`: tokens that end a turn.
    """

    name: str
    syntax: ReplySyntax
    calls: Calls | None  # None: `program` reads whole replies, reasoning and all
    signs: tuple[tuple[str, ...], ...]
    think: Think | None = THINK
    markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    program: Callable[[Asked], Program] | None = None


FAMILIES: tuple[Family, ...] = (
    Family(
        "gpt-oss",
        call_syntax.HARMONY_REPLY,
        None,
        (("<|channel|>", "<|message|>"),),
        think=None,
        markers=harmony.MARKERS,
        ends=harmony.ENDS,
        program=harmony.harmony,
    ),
    Family(
        "kimi-k3",
        call_syntax.KIMI_K3_REPLY,
        None,
        (("<|open|>", "<|close|>", "<|sep|>"),),
        think=_XTML,
        markers=kimi_xtml.MARKERS,
        ends=("<|end_of_msg|>",),
        program=kimi_xtml.kimi_xtml,
    ),
    Family(
        "kimi-k2",
        ReplySyntax(call_syntax.KIMI_K2),
        kimi.KimiCalls(),
        (("<|tool_calls_section_begin|>",),),
        markers=kimi.MARKERS,
        ends=("<|im_end|>",),
    ),
    Family(
        "deepseek-v3",
        ReplySyntax(call_syntax.DEEPSEEK_V3),
        deepseek.DeepSeekCalls(),
        (("<｜tool▁calls▁begin｜>", "```json"),),
        markers=deepseek.MARKERS,
    ),
    Family(
        "deepseek-v31",
        ReplySyntax(call_syntax.DEEPSEEK_V31),
        deepseek.DeepSeekCalls(),
        (("<｜tool▁calls▁begin｜>",),),
        markers=deepseek.MARKERS,
    ),
    Family(
        "deepseek-v32",
        ReplySyntax(call_syntax.DEEPSEEK_V32),
        dsml.DsmlCalls(),
        (("｜DSML｜", "function_calls>"),),  # apart: a template may name the token
        markers=dsml.MARKERS,
    ),
    Family(
        "deepseek-v4",
        ReplySyntax(call_syntax.DEEPSEEK_V4),
        dsml.DsmlCalls(),
        (("｜DSML｜", "tool_calls>"),),
        markers=dsml.MARKERS,
    ),
    Family(
        "deepseek-v41",
        ReplySyntax(call_syntax.DEEPSEEK_V41),
        dsml.DsmlCalls(),
        (("｜DSML｜ calls",), ("｜DSML｜",)),
        markers=dsml.MARKERS,
    ),
    Family(
        "mistral",
        ReplySyntax(call_syntax.MISTRAL),
        mistral.MistralCalls(),
        (("[TOOL_CALLS]", "[ARGS]"),),
        markers=mistral.MARKERS,
    ),
    Family(
        "mistral-v3",
        ReplySyntax(call_syntax.MISTRAL_ARRAY),
        mistral.MistralCalls(),
        (("[TOOL_CALLS]",),),
        markers=mistral.MARKERS,
    ),
    Family(
        "gemma4",
        ReplySyntax(call_syntax.GEMMA),
        gemma.GemmaCalls(),
        (("<|tool_call>",),),
        think=_GEMMA,
        markers=gemma.MARKERS,
        ends=("<turn|>", "<|tool_response>"),
    ),
    Family(
        "glm47",
        ReplySyntax(call_syntax.GLM),
        glm.GlmCalls(),
        (("</arg_key><arg_value>",),),
        ends=("<|user|>", "<|observation|>"),
    ),
    Family(
        "glm45",
        ReplySyntax(call_syntax.GLM_LINES),
        glm.GlmCalls(),
        (("<arg_key>",),),
        ends=("<|user|>", "<|observation|>"),
    ),
    Family(
        "qwen3-xml",
        ReplySyntax(call_syntax.QWEN_XML),
        qwen_xml.QwenXmlCalls(),
        (("<function=", "<parameter="),),
    ),
    Family("hermes", ReplySyntax(call_syntax.HERMES), hermes.HermesCalls(), (("<tool_call>",),)),
    Family(
        "llama4",
        ReplySyntax(call_syntax.LLAMA),
        pythonic.LlamaPythonicCalls(),
        (("<|header_start|>",), ("func_name1(params_name1=",)),  # as Meta tells Llama 3.2 and 4 of it
        markers=(*pythonic.MARKERS, *llama.MARKERS),
        ends=("<|eot|>", "<|eom|>"),
    ),
    Family(
        "llama3",
        ReplySyntax(call_syntax.LLAMA),
        llama.LlamaCalls(),
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        markers=llama.MARKERS,
        ends=("<|eot_id|>", "<|eom_id|>"),
    ),
)
HERMES = next(family for family in FAMILIES if family.name == "hermes")
BY_NAME = {family.name: family for family in FAMILIES}


def detect(template: str) -> Family:
    """The family a chat template's source is made for; Hermes where none of them is known there."""
    for family in FAMILIES:
        if any(all(sign in template for sign in signs) for signs in family.signs):
            return family
    return HERMES


def detect_think(template: str, family: Family) -> Think | None:
    """How the template's model sets reasoning apart. Models whose template says nothing of it may still
    begin with `<think>`."""
    if family.program is None and "[THINK]" in template:
        return _MISTRAL
    return family.think


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How one model writes replies: makes their parsers."""

    family: Family = HERMES
    think: Think | None = THINK
    reasons: bool = False  # the model is known to reason

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be seen, be they control tokens or not."""
        think = (self.think.tokens or (self.think.open, self.think.close)) if self.think else ()
        return tuple(dict.fromkeys((*self.family.markers, *think)))

    @property
    def inner(self) -> frozenset[str]:
        """Tokens that are part of replies, so that no reply ends before one."""
        calls = self.family.calls.triggers if self.family.calls is not None else ()
        return frozenset({*self.markers, *calls, hermes.OPEN, hermes.CLOSE})

    @property
    def ends(self) -> tuple[str, ...]:
        """Tokens that end a turn, whatever else does."""
        return self.family.ends

    def inside(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has begun the reasoning already."""
        return self.think is not None and prompt_end.rstrip().endswith(self.think.open.rstrip())

    @property
    def syntax(self) -> ReplySyntax:
        """How replies are written, for grammars."""
        if self.family.program is not None:
            return self.family.syntax
        return replace(self.family.syntax, think=(self.think.open, self.think.close) if self.think else None)

    def thinking(self, prompt_end: str) -> Thinking:
        """What reasoning may come behind a prompt that ends so."""
        if self.inside(prompt_end):
            return "inside"
        if not self.reasons or (self.think and prompt_end.rstrip().endswith(self.think.close)):
            return "no"
        return "may"

    def begun(self, text: str) -> bool:
        """Whether a reply that begins with `text` goes on with reasoning."""
        return self.think is not None and text.rfind(self.think.open) > text.rfind(self.think.close)

    def parser(
        self, tools: Sequence[ToolSpec] = (), *, calls: bool = True, inside: bool = False
    ) -> ReplyParser:
        """A parser for one reply. `calls`: they are looked for."""
        asked = Asked(calls, {tool.name: tool for tool in tools}, inside)
        family = self.family
        if family.program is not None:
            return StepParser(family.program(asked))
        assert family.calls is not None
        return StepParser(tagged(family.calls, self.think, asked, family.markers))


DEFAULT_FORM = ReplyForm()


def reply_form(
    template: str, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> ReplyForm:
    """The form for a model with this template; names (of FAMILIES, of REASONING) override it."""
    family = BY_NAME[tool_parser] if tool_parser else detect(template)
    if family.program is not None:
        return ReplyForm(family, family.think, reasons=True)
    if reasoning_parser:
        think = REASONING[reasoning_parser]
        return ReplyForm(family, think, reasons=think is not None)
    think = detect_think(template, family)
    return ReplyForm(family, think, reasons=think is not None and think.close in template)
