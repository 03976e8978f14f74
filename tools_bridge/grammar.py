"""What a client asks of a reply's form, as the source of a grammar. Pure text; nothing compiled.

The language is xgrammar's structural tags. How calls are written is the model's: `tools_bridge.call_syntax`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tools_bridge.call_syntax import HERMES_REPLY, NUMBER, CallSyntax, ReplySyntax
from tools_bridge.client_tags import held_tag
from tools_bridge.holding import RESPONSE_PLACE, Format, Holder, tool_place
from tools_bridge.json_schema import MARKS
from tools_bridge.schemas import MAX_ENUM, GrammarError, check_pattern
from tools_bridge.shared_tags import shared_tags
from tools_bridge.types import ToolSpec

__all__ = ["GrammarError", "GrammarSource", "ResponseFormat", "ToolChoice", "reply_grammar"]

MAX_BLANKS = 2  # per gap between JSON tokens: a small model could go on with blanks for ever
MAX_GRAMMAR_CHARS = 64 * 1024  # of a grammar that a client wrote

Thinking = Literal["no", "may", "inside"]
"""Whether reasoning may come first, or has begun where the reply begins."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar, not yet compiled: canonical JSON of an xgrammar structural tag."""

    text: str
    left_out: tuple[str, ...] = field(default=(), compare=False)
    """What of schemas that are not strict is not held, and where."""
    parts: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(the place of a schema, pattern or grammar that a client sent, a grammar of it alone)."""

    @property
    def id(self) -> str:
        """A digest of the text: equal grammars have equal ids, in every process."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names` restricts the choice to these tools; empty means all of them.

    OpenAI's named choice is `ToolChoice("required", (name,), single=True)`; `allowed_tools` is its
    mode with the allowed names. `single` asks for one call at most, as does `parallel=False`.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    single: bool = False

    @classmethod
    def named(cls, name: str) -> ToolChoice:
        """Exactly one call, of this tool."""
        return cls("required", (name,), single=True)


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form of a reply that is not a call. `schema` is for "json_schema" (and an xgrammar structural
    tag's object for "structural_tag"), `text` is the pattern of a "regex" or an "ebnf" grammar, `choices`
    are the texts of a "choice"."""

    kind: Literal["text", "json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"] = "text"
    schema: dict[str, object] | None = None
    strict: bool = True
    text: str = ""
    choices: tuple[str, ...] = ()


def reply_grammar(
    tools: Sequence[ToolSpec] = (),
    choice: ToolChoice | None = None,
    *,
    parallel: bool = True,
    response: ResponseFormat | None = None,
    syntax: ReplySyntax = HERMES_REPLY,
    thinking: Thinking = "no",
    let_go: Mapping[str, str] | None = None,
) -> GrammarSource | None:
    """The grammar that a reply must follow; None where any text will do.

    - "required": one or more calls and nothing else (one exactly if not `parallel`), each with
      arguments by its schema; `response` has no say.
    - "auto": a call's arguments are held to the schema if the tool is strict, and are any JSON
      object otherwise; there is no grammar at all if no tool is strict, all may be called, `parallel`
      is True and the response is text. With another response: either calls or such a response.
    - "none", or no tools: the response format alone.

    Reasoning comes before all that, as far as `thinking` allows it. `let_go`: places of schemas that are not
    strict and shall be held to their type alone, and why.
    What cannot be asked for is a GrammarError that names the place.
    """
    choice = choice or ToolChoice()
    response = response or ResponseFormat()
    made = _Making(syntax, let_go or {})
    body = made.response(response)
    if body is not None:
        body = _around(syntax.said, body)
    offered = [] if choice.mode == "none" else _offered(tools, choice)
    if choice.mode == "required" and not offered:
        raise GrammarError("tool_choice: a call is required but no tools are given")
    if not offered:
        return None if body is None else made.source(_after_thought(body, syntax, thinking))
    required = choice.mode == "required"
    single = choice.single or not parallel
    free = not single and not choice.names and not any(tool.strict for tool in offered)
    if not required and body is None and free:
        return None
    tags = shared_tags([made.tag(tool, held=required or tool.strict) for tool in offered])
    if required:
        return made.source(_after_thought(_calls(tags, syntax.calls, single), syntax, thinking))
    if body is None:
        among = _among_text(tags, syntax.calls, single)
        return made.source(_after_thought(among, syntax, thinking, text=True))
    either: Format = {"type": "or", "elements": [body, _calls(tags, syntax.calls, single)]}
    return made.source(_after_thought(either, syntax, thinking))


class _Making:
    """Formats of what clients sent, and a note of each."""

    def __init__(self, syntax: ReplySyntax, let_go: Mapping[str, str]) -> None:
        self._calls = syntax.calls
        self._holder = Holder(let_go)
        self._parts: list[tuple[str, str]] = []

    def source(self, form: Format) -> GrammarSource:
        return GrammarSource(_text(form), tuple(self._holder.left_out), tuple(self._parts))

    def response(self, response: ResponseFormat) -> Format | None:
        match response.kind:
            case "text":
                return None
            case "json_object":
                return _json({"type": "object"})
            case "json_schema":
                held = self._holder.answer(response.schema, strict=response.strict)
                return self._noted(RESPONSE_PLACE, _json(held))
            case "choice":
                return _choices(response.choices)
            case "regex":
                if not response.text:
                    raise GrammarError("regex: the pattern is empty")
                check_pattern(response.text, "regex")
                return self._noted("regex", {"type": "regex", "pattern": response.text})
            case "ebnf":
                if not response.text.strip() or len(response.text) > MAX_GRAMMAR_CHARS:
                    raise GrammarError(f"grammar: it must have 1 to {MAX_GRAMMAR_CHARS} characters")
                return self._noted("grammar", {"type": "grammar", "grammar": response.text})
        return held_tag(response.schema, self._holder.embedded, self._noted, MAX_BLANKS)

    def tag(self, tool: ToolSpec, *, held: bool) -> Format:
        """`held`: to its schema; of what is not, nothing is looked at."""
        syntax = self._calls
        content = _json(self._holder.arguments(tool, syntax) if held else {"type": "object"})
        if syntax.style != "json":
            content |= {"style": syntax.style}
            if syntax.style != "gemma":  # which has its own
                content["excludes"] = list(MARKS[syntax.style])
        if held:
            self._noted(tool_place(tool.name), content)
        if syntax.numbered:
            number: Format = {"type": "regex", "pattern": NUMBER}
            content = {"type": "sequence", "elements": [number, _const(syntax.numbered), content]}
        return {"type": "tag", "begin": syntax.begin(tool.name), "content": content, "end": syntax.end}

    def _noted(self, place: str, form: Format) -> Format:
        self._parts.append((place, _text(form)))
        return form


def _text(form: Format) -> str:
    # Key order counts in a schema (it is the order of the properties), so keys are not sorted.
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False, separators=(",", ":"))


def _after_thought(form: Format, syntax: ReplySyntax, thinking: Thinking, *, text: bool = False) -> Format:
    """The form behind reasoning. `text`: it allows any text, so that reasoning may begin in it anyway."""
    if syntax.think is None or thinking == "no" or (text and thinking == "may"):
        return form
    begin, end = syntax.think
    thought: Format = {
        "type": "tag",
        "begin": begin if thinking == "may" else "",
        "content": {"type": "any_text"},
        "end": end,
    }
    blanks = {"type": "regex", "pattern": f"[ \\n]{{0,{MAX_BLANKS}}}"}
    between = _const(syntax.between) if syntax.between else blanks
    first: Format = {"type": "sequence", "elements": [thought, between]}
    if thinking == "may":
        first = {"type": "optional", "content": first}
    return {"type": "sequence", "elements": [first, form]}


def _offered(tools: Sequence[ToolSpec], choice: ToolChoice) -> list[ToolSpec]:
    by_name: dict[str, ToolSpec] = {}
    for tool in tools:
        if not tool.name:
            raise GrammarError("tools: a tool has no name")
        if tool.name in by_name:
            raise GrammarError(f"tools: two tools are called {tool.name!r}")
        by_name[tool.name] = tool
    for name in choice.names:
        if name not in by_name:
            raise GrammarError(f"tool_choice: there is no tool called {name!r}")
    return [tool for tool in tools if not choice.names or tool.name in choice.names]


def _json(schema: object) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _around(marks: tuple[str, str], form: Format) -> Format:
    before, after = marks
    parts = [*([_const(before)] if before else []), form, *([_const(after)] if after else [])]
    return form if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _choices(texts: tuple[str, ...]) -> Format:
    if not texts or not all(texts):
        raise GrammarError("choice: at least one text is needed, and none may be empty")
    if len(texts) > MAX_ENUM:
        raise GrammarError(f"choice: {len(texts)} texts are more than {MAX_ENUM}")
    elements = [_const(text) for text in dict.fromkeys(texts)]
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _calls(tags: list[Format], syntax: CallSyntax, single: bool) -> Format:
    calls: Format = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": single or syntax.alone,
    }
    return _around((syntax.opening, syntax.closing), calls)


def _among_text(tags: list[Format], syntax: CallSyntax, single: bool) -> Format:
    if syntax.opening:
        inner = _calls(tags, replace(syntax, opening="", closing=""), single)
        tags = [{"type": "tag", "begin": syntax.opening, "content": inner, "end": syntax.closing}]
    return {
        "type": "triggered_tags",
        "triggers": [syntax.trigger],
        "tags": tags,
        "stop_after_first": single or syntax.alone,
    }
