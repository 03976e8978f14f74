"""The tools bridge's Hermes form, as the API's tool parser and grammar maker."""

from __future__ import annotations

from agentserve.server.http.structure import Form
from agentserve.server.sessions.answer import Call, CallDelta
from agentserve.server.sessions.identity import new_call_id
from tools_bridge.compiler import GrammarCompiler
from tools_bridge.deltas import ArgumentsDelta, CallOpened, ContentDelta, Delta
from tools_bridge.families.hermes import DeltaTracker
from tools_bridge.grammar import GrammarSource, ResponseFormat, ToolChoice, hermes_grammar
from tools_bridge.types import ToolSpec


class HermesParser:
    """Finds `<tool_call>` objects in growing text, and gives each call an id."""

    def __init__(self) -> None:
        self._tracker = DeltaTracker()
        self._ids: list[str] = []

    def push(self, piece: str) -> tuple[str, list[CallDelta]]:
        return self._deltas(self._tracker.feed(piece))

    def finish(self) -> tuple[str, list[CallDelta]]:
        return self._deltas(self._tracker.finish())

    @property
    def truncated(self) -> bool:
        return self._tracker.parsed.truncated

    @property
    def calls(self) -> list[Call]:
        found = self._tracker.parsed.calls
        return [
            Call(id_, call.name, call.arguments, call.complete)
            for id_, call in zip(self._ids, found, strict=True)
        ]

    def _deltas(self, deltas: list[Delta]) -> tuple[str, list[CallDelta]]:
        text: list[str] = []
        calls: list[CallDelta] = []
        for delta in deltas:
            match delta:
                case ContentDelta(piece):
                    text.append(piece)
                case CallOpened(index, name):
                    self._ids.append(new_call_id())
                    calls.append(CallDelta(index, id=self._ids[index], name=name))
                case ArgumentsDelta(index, arguments):
                    calls.append(CallDelta(index, arguments))
                case _:
                    pass  # a call that closed: `calls` tells how
        return "".join(text), calls


class HermesGrammars:
    """Compiles forms to grammars over one vocabulary."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def source(self, form: Form) -> GrammarSource | None:
        tools = [
            ToolSpec(
                tool["function"]["name"],
                tool["function"]["parameters"],
                tool["function"]["name"] in form.strict,
            )
            for tool in form.tools
        ]
        return hermes_grammar(tools, _choice(form), parallel=form.parallel, response=_response(form))

    def cached(self, source: GrammarSource) -> str | None:
        return self._compiler.cached(source)

    def compile(self, source: GrammarSource) -> str:
        return self._compiler.compile(source)


def _choice(form: Form) -> ToolChoice:
    match form.choice:
        case "named":
            return ToolChoice.named(form.named or "")
        case "required":
            return ToolChoice("required")
        case "auto":
            return ToolChoice("auto")
    return ToolChoice("none")


def _response(form: Form) -> ResponseFormat:
    if not form.json:
        return ResponseFormat()
    if form.schema is None:
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", form.schema, form.strict_schema)
