"""The tools bridge's forms of replies, as the API's parsers and grammar maker."""

from __future__ import annotations

from dataclasses import replace

from agentserve.server.http.answer_form import Form
from agentserve.server.http.reply_port import Reasoning
from agentserve.server.sessions.answer import Call, CallDelta, CallsOnly, Found, ToolParser
from agentserve.server.sessions.identity import new_call_id
from tools_bridge.call_syntax import CallSyntax
from tools_bridge.compiler import GrammarCompiler
from tools_bridge.deltas import ArgumentsDelta, CallClosed, CallOpened, ContentDelta, Delta, ReasoningDelta
from tools_bridge.grammar import ResponseFormat, ToolChoice
from tools_bridge.parser import ReplyParser
from tools_bridge.registry import ReplyForm
from tools_bridge.reply_request import GrammarRequest, grammar_request
from tools_bridge.types import ToolSpec


class ReplyParsers:
    """Makes the parsers of one model's answers."""

    def __init__(self, form: ReplyForm) -> None:
        self._form = form

    @property
    def written(self) -> CallSyntax:
        return self._form.family.syntax.calls

    def __call__(self, form: Form, before: str, *, continues: bool = False) -> ToolParser:
        """A parser for one answer of a `form`. `before`: the text that ends its prompt or, where it
        `continues` one, what that begins with."""
        inside = self._form.begun(before) if continues else self._form.inside(before)
        parser = self._form.parser(tool_specs(form), calls=form.calls, inside=inside)
        return CallsOnly(CallParser(parser)) if form.forced else CallParser(parser)

    def reasoning(self, before: str, *, continues: bool = False) -> Reasoning | None:
        """How reasoning is set apart. Families that read whole replies have no one mark for it."""
        think = self._form.think
        if think is None or think.tokens or self._form.family.program is not None:
            return None
        inside = self._form.begun(before) if continues else self._form.inside(before)
        return Reasoning(think.open, think.close, inside)


class CallParser:
    """A parser of the tools bridge; gives each call an id."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._ids: list[str] = []

    def push(self, piece: str) -> Found:
        return self._found(self._parser.feed(piece))

    def finish(self, *, cut: bool) -> Found:
        return self._found(self._parser.finish(cut=cut))

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    @property
    def truncated(self) -> bool:
        return self._parser.parsed.truncated

    @property
    def calls(self) -> list[Call]:
        found = self._parser.parsed.calls
        return [
            Call(id_, call.name, call.arguments, call.complete)
            for id_, call in zip(self._ids, found, strict=True)
        ]

    def _found(self, deltas: list[Delta]) -> Found:
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[CallDelta] = []
        for delta in deltas:
            match delta:
                case ContentDelta(piece):
                    text.append(piece)
                case ReasoningDelta(piece):
                    reasoning.append(piece)
                case CallOpened(index, name):
                    self._ids.append(new_call_id())
                    calls.append(CallDelta(index, id=self._ids[index], name=name))
                case ArgumentsDelta(index, arguments):
                    calls.append(CallDelta(index, arguments))
                case CallClosed(index, error) if error:
                    last = calls.pop() if calls and calls[-1].index == index else CallDelta(index)
                    calls.append(replace(last, broken=True))
                case _:
                    pass  # a call that is whole
        return Found("".join(text), calls, "".join(reasoning))


def tool_specs(form: Form) -> list[ToolSpec]:
    return [
        ToolSpec(
            tool["function"]["name"],
            tool["function"]["parameters"],
            tool["function"]["name"] in form.strict,
        )
        for tool in form.tools
    ]


class ReplyGrammars:
    """Compiles forms to grammars over one vocabulary, in the form of one model's replies."""

    def __init__(self, compiler: GrammarCompiler, form: ReplyForm) -> None:
        self._compiler = compiler
        self._form = form

    def source(self, form: Form, prompt_end: str, owner: str = "") -> GrammarRequest:
        return grammar_request(
            self._form,
            tool_specs(form),
            _choice(form),
            parallel=form.parallel,
            response=_response(form),
            thinking=self._form.thinking(prompt_end),
            owner=owner,
        )

    def cached(self, source: GrammarRequest) -> str | None:
        return self._compiler.cached(source)

    def compile(self, source: GrammarRequest) -> str:
        return self._compiler.compile(source)

    def close(self) -> None:
        """Ends what is being compiled, too."""
        self._compiler.close()


def _choice(form: Form) -> ToolChoice:
    match form.choice:
        case "named":
            return ToolChoice.named(form.named or "")
        case "required":
            return ToolChoice("required", form.allowed)
        case "auto":
            return ToolChoice("auto", form.allowed)
    return ToolChoice("none")


def _response(form: Form) -> ResponseFormat:
    if form.regex:
        return ResponseFormat("regex", text=form.regex)
    if form.choices:
        return ResponseFormat("choice", choices=form.choices)
    if form.ebnf:
        return ResponseFormat("ebnf", text=form.ebnf)
    if form.structural_tag:
        return ResponseFormat("structural_tag", form.structural_tag)
    if not form.json:
        return ResponseFormat()
    if form.schema is None:
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", form.schema, form.strict_schema)
