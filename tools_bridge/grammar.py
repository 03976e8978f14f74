"""What a client asks of a reply's form, as the source of a grammar. Pure text; nothing compiled.

The language is xgrammar's structural tags. Calls have the Hermes / Qwen form
`<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`, one per line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tools_bridge.schemas import GrammarError, check_schema
from tools_bridge.types import ToolSpec

__all__ = ["GrammarError", "GrammarSource", "ResponseFormat", "ToolChoice", "hermes_grammar"]

MAX_BLANKS = 2  # per gap between JSON tokens: a small model could go on with blanks for ever
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

Format = dict[str, object]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar, not yet compiled: canonical JSON of an xgrammar structural tag."""

    text: str

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
    """The form of a reply that is not a call. `schema` is for "json_schema" alone."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, object] | None = None
    strict: bool = False


def hermes_grammar(
    tools: Sequence[ToolSpec] = (),
    choice: ToolChoice | None = None,
    *,
    parallel: bool = True,
    response: ResponseFormat | None = None,
) -> GrammarSource | None:
    """The grammar that a reply must follow; None where any text will do.

    - "required": one or more calls and nothing else (one exactly if not `parallel`), each with
      arguments by its schema; `response` has no say.
    - "auto": a call's arguments are held to the schema if the tool is strict, and are any JSON
      object otherwise; there is no grammar at all if no tool is strict, all may be called, `parallel`
      is True and the response is text. With a JSON response: either calls or such a JSON value.
    - "none", or no tools: the response format alone.

    What cannot be asked for is a GrammarError that names the place.
    """
    choice = choice or ToolChoice()
    response = response or ResponseFormat()
    body = _response(response)
    offered = [] if choice.mode == "none" else _offered(tools, choice)
    if choice.mode == "required" and not offered:
        raise GrammarError("tool_choice: a call is required but no tools are given")
    if not offered:
        return None if body is None else _source(body)
    required = choice.mode == "required"
    single = choice.single or not parallel
    free = not single and not choice.names and not any(tool.strict for tool in offered)
    if not required and body is None and free:
        return None
    tags = [_tag(tool, held=required or tool.strict) for tool in offered]
    if required:
        return _source(_calls(tags, single))
    if body is None:
        return _source(
            {"type": "triggered_tags", "triggers": [_OPEN], "tags": tags, "stop_after_first": single}
        )
    return _source({"type": "or", "elements": [body, _calls(tags, single)]})


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


def _source(form: Format) -> GrammarSource:
    # Key order counts in a schema (it is the order of the properties), so keys are not sorted.
    tag = {"type": "structural_tag", "format": form}
    return GrammarSource(json.dumps(tag, ensure_ascii=False, separators=(",", ":")))


def _json(schema: object) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS}


def _response(response: ResponseFormat) -> Format | None:
    if response.kind == "text":
        return None
    if response.kind == "json_object":
        return _json({"type": "object"})
    check_schema(response.schema, "response_format.json_schema.schema", strict=response.strict)
    return _json(response.schema)


def _tag(tool: ToolSpec, *, held: bool) -> Format:
    check_schema(tool.parameters, f"tools.{tool.name}.parameters", strict=tool.strict)
    schema = _arguments_schema(tool.parameters) if held else {"type": "object"}
    name = json.dumps(tool.name, ensure_ascii=False)
    return {
        "type": "tag",
        "begin": f'{_OPEN}\n{{"name": {name}, "arguments": ',
        "content": _json(schema),
        "end": f"}}\n{_CLOSE}",
    }


def _arguments_schema(parameters: dict[str, object]) -> dict[str, object]:
    """Arguments are always an object; no parameters means the empty one (as OpenAI has it)."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type")
    if kind is None and not parameters.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        return {"type": "object", **parameters}
    if kind not in (None, "object"):
        raise GrammarError(f"tools: the parameters of a tool must be of type 'object', not {kind!r}")
    return parameters


def _calls(tags: list[Format], single: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": single,
    }
