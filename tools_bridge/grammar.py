"""What a client asks of a reply's form, as the source of a grammar. Pure text; nothing compiled.

The language is xgrammar's structural tags. How calls are written is the model's: `tools_bridge.call_syntax`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tools_bridge.call_syntax import HERMES_REPLY, NUMBER, CallSyntax, ReplySyntax
from tools_bridge.json_schema import MARKS, call_schema, exact_schema, held_schema, looser
from tools_bridge.schemas import MAX_ENUM, GrammarError, check_json, check_pattern, check_schema
from tools_bridge.shared_tags import shared_tags
from tools_bridge.typed import kinds_of, to_json
from tools_bridge.types import ToolSpec

__all__ = ["GrammarError", "GrammarSource", "ResponseFormat", "ToolChoice", "reply_grammar"]

MAX_BLANKS = 2  # per gap between JSON tokens: a small model could go on with blanks for ever
MAX_GRAMMAR_CHARS = 64 * 1024  # of a grammar that a client wrote

Thinking = Literal["no", "may", "inside"]
"""Whether reasoning may come first, or has begun where the reply begins."""

Format = dict[str, object]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar, not yet compiled: canonical JSON of an xgrammar structural tag."""

    text: str
    left_out: tuple[str, ...] = field(default=(), compare=False)
    """What of schemas that are not strict is not held, and where."""

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
) -> GrammarSource | None:
    """The grammar that a reply must follow; None where any text will do.

    - "required": one or more calls and nothing else (one exactly if not `parallel`), each with
      arguments by its schema; `response` has no say.
    - "auto": a call's arguments are held to the schema if the tool is strict, and are any JSON
      object otherwise; there is no grammar at all if no tool is strict, all may be called, `parallel`
      is True and the response is text. With another response: either calls or such a response.
    - "none", or no tools: the response format alone.

    Reasoning comes before all that, as far as `thinking` allows it.
    What cannot be asked for is a GrammarError that names the place.
    """
    choice = choice or ToolChoice()
    response = response or ResponseFormat()
    left_out: list[str] = []
    body = _response(response, left_out)
    if body is not None:
        body = _around(syntax.said, body)
    offered = [] if choice.mode == "none" else _offered(tools, choice)
    if choice.mode == "required" and not offered:
        raise GrammarError("tool_choice: a call is required but no tools are given")
    if not offered:
        return None if body is None else _source(_after_thought(body, syntax, thinking), left_out)
    required = choice.mode == "required"
    single = choice.single or not parallel
    free = not single and not choice.names and not any(tool.strict for tool in offered)
    if not required and body is None and free:
        return None
    tags = shared_tags([_tag(tool, syntax.calls, left_out, held=required or tool.strict) for tool in offered])
    if required:
        return _source(_after_thought(_calls(tags, syntax.calls, single), syntax, thinking), left_out)
    if body is None:
        among = _among_text(tags, syntax.calls, single)
        return _source(_after_thought(among, syntax, thinking, text=True), left_out)
    either: Format = {"type": "or", "elements": [body, _calls(tags, syntax.calls, single)]}
    return _source(_after_thought(either, syntax, thinking), left_out)


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


def _source(form: Format, left_out: Iterable[str]) -> GrammarSource:
    # Key order counts in a schema (it is the order of the properties), so keys are not sorted.
    tag = {"type": "structural_tag", "format": form}
    return GrammarSource(json.dumps(tag, ensure_ascii=False, separators=(",", ":")), tuple(left_out))


def _json(schema: object) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _around(marks: tuple[str, str], form: Format) -> Format:
    before, after = marks
    parts = [*([_const(before)] if before else []), form, *([_const(after)] if after else [])]
    return form if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _response(response: ResponseFormat, left_out: list[str]) -> Format | None:
    match response.kind:
        case "text":
            return None
        case "json_object":
            return _json({"type": "object"})
        case "json_schema":
            where = "response_format.json_schema.schema"
            return _json(_answer_schema(response, where, left_out))
        case "regex":
            if not response.text:
                raise GrammarError("regex: the pattern is empty")
            check_pattern(response.text, "regex")
            return {"type": "regex", "pattern": response.text}
        case "choice":
            return _choices(response.choices)
        case "ebnf":
            if not response.text.strip() or len(response.text) > MAX_GRAMMAR_CHARS:
                raise GrammarError(f"grammar: it must have 1 to {MAX_GRAMMAR_CHARS} characters")
            return {"type": "grammar", "grammar": response.text}
    check_json(response.schema, "structural_tag")
    form = (response.schema or {}).get("format")
    if not isinstance(form, dict):
        raise GrammarError("structural_tag: an object with a 'format' is expected")
    return form


def _answer_schema(response: ResponseFormat, where: str, left_out: list[str]) -> dict[str, object]:
    def exact() -> Format:
        check_schema(schema, where)
        return exact_schema(schema, where)

    def held(wanted: Format) -> tuple[Format, list[str]]:
        check_schema(wanted, where)
        return held_schema(wanted, where)

    schema = response.schema
    if response.strict or schema is None:
        return _strictly(exact, 'say "strict": false')
    check_json(schema, where)
    return _first_held(schema, held, where, left_out)


def _choices(texts: tuple[str, ...]) -> Format:
    if not texts or not all(texts):
        raise GrammarError("choice: at least one text is needed, and none may be empty")
    if len(texts) > MAX_ENUM:
        raise GrammarError(f"choice: {len(texts)} texts are more than {MAX_ENUM}")
    elements = [_const(text) for text in dict.fromkeys(texts)]
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _tag(tool: ToolSpec, syntax: CallSyntax, left_out: list[str], *, held: bool) -> Format:
    where = f"tools.{tool.name}.parameters"
    schema: Format = {"type": "object"}  # of what is not held nothing is looked at
    if held:
        check_json(tool.parameters, where)
        schema = _held(tool, syntax, where, left_out)
    content = _json(schema)
    if syntax.style != "json":
        content |= {"style": syntax.style}
        if syntax.style != "gemma":  # which has its own
            content["excludes"] = list(MARKS[syntax.style])
    if syntax.numbered:
        number: Format = {"type": "regex", "pattern": NUMBER}
        content = {"type": "sequence", "elements": [number, _const(syntax.numbered), content]}
    return {"type": "tag", "begin": syntax.begin(tool.name), "content": content, "end": syntax.end}


def _held(tool: ToolSpec, syntax: CallSyntax, where: str, left_out: list[str]) -> dict[str, object]:
    """What the arguments are held to: the parameters by the letter, or as much of them as can be held
    where the tool is not strict. There the last that is tried is any object, which all forms can write."""

    def read(key: str, text: str) -> object:
        return json.loads(to_json(text, kinds_of(tool, key)))

    def exact() -> Format:
        check_schema(parameters, where)
        schema = exact_schema(parameters, where)
        return schema if syntax.style == "json" else call_schema(schema, syntax.style, where, read)

    def held(wanted: Format) -> tuple[Format, list[str]]:
        check_schema(wanted, where)
        schema, missing = held_schema(wanted, where)
        if syntax.style != "json":
            schema = call_schema(schema, syntax.style, where, read, missing)
        return schema, missing

    parameters = _arguments(tool.parameters)
    if tool.strict:
        return _strictly(exact, "leave out 'strict'")
    return _first_held(parameters, held, where, left_out)


def _strictly(exact: Callable[[], Format], otherwise: str) -> Format:
    try:
        return exact()
    except GrammarError as error:
        if "be held" not in str(error):
            raise
        raise GrammarError(f"{error}: drop it from the schema, or {otherwise}") from None


def _first_held(
    schema: Format, held: Callable[[Format], tuple[Format, list[str]]], where: str, left_out: list[str]
) -> Format:
    refusal = GrammarError("a schema is needed")
    for wanted, what in looser(schema):
        try:
            found, missing = held(wanted)
        except GrammarError as error:
            refusal = error
            continue
        left_out += [f"{where}: {what}"] * bool(what) + missing
        return found
    raise refusal


def _arguments(parameters: dict[str, object]) -> dict[str, object]:
    """Arguments are always an object; no parameters means the empty one (as OpenAI has it)."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type")
    if kind not in (None, "object"):
        raise GrammarError(f"tools: the parameters of a tool must be of type 'object', not {kind!r}")
    return {"type": "object", **parameters}


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
