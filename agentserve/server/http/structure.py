"""What form an answer must have: tool choice and response format, checked and turned into a grammar."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from agentserve.server.engine_port import Engine
from agentserve.server.errors import ApiError
from agentserve.server.http.schemas import ChatRequest, ResponseFormat
from agentserve.server.http.tool_choice import tool_choice
from agentserve.server.limits import Limits
from agentserve.server.sessions.answer import ToolParser
from agentserve.server.text_port import JsonObject
from tools_bridge.call_syntax import CallSyntax
from tools_bridge.compiler import CompilerUnavailable
from tools_bridge.reply_request import GrammarRequest


@dataclass(frozen=True, slots=True)
class Form:
    """The form a request asks for. `schema` None with `json` means any JSON object."""

    tools: tuple[JsonObject, ...] = ()  # OpenAI's shape; those the answer may call
    strict: frozenset[str] = frozenset()  # names of tools whose arguments must match their schema
    choice: str = "none"  # none | auto | required | named
    named: str | None = None
    allowed: tuple[str, ...] = ()  # names of the tools that may be called; empty: all
    parallel: bool = True
    json: bool = False
    schema: JsonObject | None = None
    strict_schema: bool = True  # the schema holds to the letter
    regex: str = ""  # the answer's form as a pattern, as one of `choices`, as a grammar in EBNF, or as
    choices: tuple[str, ...] = ()  # an xgrammar structural tag; at most one of these and `json`
    ebnf: str = ""
    structural_tag: JsonObject | None = None

    @property
    def calls(self) -> bool:
        """Tool calls in the answer are to be found and handed to the client."""
        return self.choice != "none"

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def held(self) -> bool:
        """What is no call has a form of its own."""
        return bool(self.json or self.regex or self.choices or self.ebnf or self.structural_tag)

    @property
    def constrained(self) -> bool:
        """Sampling needs a grammar."""
        auto = self.choice == "auto" and (bool(self.strict or self.allowed) or not self.parallel)
        return self.held or self.forced or auto


class ParserMaker(Protocol):
    @property
    def written(self) -> CallSyntax:
        """How the model writes calls."""
        ...

    def __call__(self, form: Form, before: str, *, continues: bool = False) -> ToolParser:
        """A parser for one answer of a `form`. `before`: the text that ends its prompt or, where it
        `continues` one, what that begins with."""
        ...

    def reasoning(self, before: str, *, continues: bool = False) -> Reasoning | None:
        """How the model sets reasoning apart in such an answer; None where it has no marks for that."""
        ...


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around it, and whether an answer begins behind the first of them."""

    open: str
    close: str
    inside: bool


class GrammarMaker(Protocol):
    """Compiles forms; thread-safe. A schema it cannot take is a ValueError."""

    def source(self, form: Form, prompt_end: str) -> GrammarRequest:
        """What to compile; takes no time. Equal forms have equal ids. `prompt_end`: the text that the
        answer's prompt ends with, which tells whether reasoning has begun there."""
        ...

    def cached(self, source: GrammarRequest) -> str | None:
        """What was compiled (or, as a ValueError, refused) before. Does not block."""
        ...

    def compile(self, source: GrammarRequest) -> str:
        """Blocks; "" where any text will do. CompilerUnavailable: none can be compiled just now."""
        ...

    def close(self) -> None:
        """Ends what is being compiled, from any thread; soon."""
        ...


class Grammars:
    """Compiles off the event loop and makes the result known to the workers.

    Only compilations are in line for `executor`: a grammar that is known, or under way for another
    request, takes none of its threads.
    """

    def __init__(self, maker: GrammarMaker, engine: Engine, executor: Executor) -> None:
        self._maker = maker
        self._engine = engine
        self._executor = executor
        self._under_way: dict[str, asyncio.Future[str]] = {}

    async def define(self, form: Form, prompt_end: str = "") -> str | None:
        """The id to put into `Sampling.grammar`, or None where the form is free. `prompt_end`: what the
        answer's prompt will end with."""
        if not form.constrained:
            return None
        try:
            source = self._maker.source(form, prompt_end)
            compiled = self._maker.cached(source)
            if compiled is None:
                compiled = await self._compiled(source)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error), form) from None
        except CompilerUnavailable as error:  # others' schemas keep it busy, or it does not start
            headers = {"retry-after": "5"}
            raise ApiError(str(error), status=503, code="compiler_busy", headers=headers) from None
        if not compiled:
            return None
        await self._engine.define_grammar(source.id, compiled)  # each time: it may have been dropped
        return source.id

    def close(self) -> None:
        self._maker.close()

    async def _compiled(self, source: GrammarRequest) -> str:
        key = source.id
        work = self._under_way.get(key)
        if work is None:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._executor, self._maker.compile, source)
            self._under_way[key] = work
            work.add_done_callback(lambda done: self._finished(key, done))
        return await asyncio.shield(work)  # a client that leaves takes nothing from the others

    def _finished(self, key: str, work: asyncio.Future[str]) -> None:
        del self._under_way[key]
        if not work.cancelled():
            work.exception()  # seen, also where every client has left


def _refused(why: str, form: Form) -> ApiError:
    """The message may name the place already."""
    for param in ("response_format", "tools"):
        if why.startswith(param):
            return ApiError(why, param=param, code="invalid_schema")
    param = "response_format" if form.held and not form.forced else "tools"
    return ApiError(f"{param}: {why}", param=param, code="invalid_schema")


def chat_form(fields: ChatRequest, tools: list[JsonObject], limits: Limits) -> Form:
    """The form of a chat answer; contradictions are a 400."""
    left_out = [tool.type for tool in fields.tools or () if tool.type != "function"]
    choice = tool_choice(fields.tool_choice, tools, left_out)
    strict = frozenset(
        tool.function.name for tool in fields.tools or () if tool.function and tool.function.strict
    )
    wants_json, schema = response_schema(fields.response_format, limits)
    wanted = fields.response_format.json_schema if fields.response_format else None
    for i, tool in enumerate(tools):
        _bounded(tool["function"]["parameters"], f"tools[{i}].function.parameters", limits)
    return Form(
        tools=tuple(tools),
        strict=strict,
        choice=choice.mode,
        named=choice.named,
        allowed=choice.allowed,
        parallel=fields.parallel_tool_calls is not False,
        json=wants_json,
        schema=schema,
        strict_schema=wanted is None or wanted.strict is not False,
    )


def response_schema(wanted: ResponseFormat | None, limits: Limits) -> tuple[bool, JsonObject | None]:
    """(JSON wanted, its schema or None)."""
    if wanted is None or wanted.type == "text":
        return False, None
    if wanted.type == "json_object":
        return True, None
    if wanted.type != "json_schema":
        raise ApiError(
            f"response_format.type: {wanted.type!r} is not one of text, json_object, json_schema",
            param="response_format.type",
        )
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise ApiError(
            "response_format.json_schema.schema: missing", param="response_format.json_schema.schema"
        )
    _bounded(wanted.json_schema.schema, "response_format.json_schema.schema", limits)
    return True, wanted.json_schema.schema


def _bounded(schema: JsonObject, param: str, limits: Limits) -> None:
    if len(json.dumps(schema)) > limits.schema_bytes:
        raise ApiError(f"{param}: a schema may have at most {limits.schema_bytes} bytes", param=param)
