"""What of a client's schemas a reply's grammar holds: all that those say which are meant by the letter, of
others as much as can be held."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from tools_bridge.call_syntax import CallSyntax, Style
from tools_bridge.json_schema import call_schema, exact_schema, held_schema, looser
from tools_bridge.schemas import GrammarError, check_json, check_schema
from tools_bridge.typed import kinds_of, to_json
from tools_bridge.types import ToolSpec

Format = dict[str, object]
"""xgrammar's, of a part of a text; or a JSON schema."""

RESPONSE_PLACE = "response_format.json_schema.schema"

_Held = Callable[[Format], tuple[Format, list[str]]]


def tool_place(name: str) -> str:
    return f"tools.{name}.parameters"


class Holder:
    """`let_go`: places of schemas that are not strict and could not be compiled, and why; they are held to
    their type alone. `left_out`: what else is not held, and where."""

    def __init__(self, let_go: Mapping[str, str]) -> None:
        self._let_go = let_go
        self.left_out: list[str] = []

    def answer(self, schema: Format | None, *, strict: bool) -> Format:
        where = RESPONSE_PLACE

        def exact() -> Format:
            check_schema(schema, where)
            return exact_schema(schema, where)

        def held(wanted: Format) -> tuple[Format, list[str]]:
            check_schema(wanted, where)
            return held_schema(wanted, where)

        if strict or schema is None:
            return _strictly(exact, 'say "strict": false')
        check_json(schema, where)
        return self._first(schema, held, where)

    def arguments(self, tool: ToolSpec, syntax: CallSyntax) -> Format:
        """The last that is tried is any object, which all forms can write."""
        where = tool_place(tool.name)

        def read(key: str, text: str) -> object:
            return json.loads(to_json(text, kinds_of(tool, key)))

        def exact() -> Format:
            return _exact(parameters, syntax.style, where, read)

        def held(wanted: Format) -> tuple[Format, list[str]]:
            check_schema(wanted, where)
            schema, missing = held_schema(wanted, where)
            if syntax.style != "json":
                schema = call_schema(schema, syntax.style, where, read, missing)
            return schema, missing

        check_json(tool.parameters, where)
        parameters = _object(tool.parameters)
        return _strictly(exact, "leave out 'strict'") if tool.strict else self._first(parameters, held, where)

    def embedded(self, schema: object, style: Style, where: str) -> Format:
        """In a structural tag of the client's own, which nobody but the client reads."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if style != "json" and isinstance(schema, dict):
            schema = {"type": "object", **schema}
        spec = ToolSpec("", schema if isinstance(schema, dict) else {})

        def read(key: str, text: str) -> object:
            return json.loads(to_json(text, kinds_of(spec, key)))

        return _strictly(lambda: _exact(schema, style, where, read), "")

    def _first(self, schema: Format, held: _Held, where: str) -> Format:
        ways = list(looser(schema))
        if where in self._let_go:
            ways = [(ways[-1][0], f"all but its type: {self._let_go[where]}")]
        refusal = GrammarError("a schema is needed")
        for wanted, what in ways:
            try:
                found, missing = held(wanted)
            except GrammarError as error:
                refusal = error
                continue
            self.left_out += [f"{where}: {what}"] * bool(what) + missing
            return found
        raise refusal


def _exact(schema: object, style: Style, where: str, read: Callable[[str, str], object]) -> Format:
    check_schema(schema, where)
    found = exact_schema(schema, where)
    return found if style == "json" else call_schema(found, style, where, read)


def _strictly(exact: Callable[[], Format], otherwise: str) -> Format:
    try:
        return exact()
    except GrammarError as error:
        if "be held" not in str(error):
            raise
        advice = "drop it from the schema" + (f", or {otherwise}" if otherwise else "")
        raise GrammarError(f"{error}: {advice}") from None


def _object(parameters: Format) -> Format:
    """Arguments are always an object; no parameters means the empty one (as OpenAI has it)."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type")
    if kind not in (None, "object"):
        raise GrammarError(f"tools: the parameters of a tool must be of type 'object', not {kind!r}")
    return {"type": "object", **parameters}
