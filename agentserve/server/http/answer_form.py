"""What form an answer must have: tool choice and response format, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.http.schemas import ChatRequest, ResponseFormat
from agentserve.server.http.tool_choice import tool_choice
from agentserve.server.limits import Limits
from agentserve.server.text_port import JsonObject


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
    most = limits.schema_bytes
    # The first is never longer, and twenty times as fast: what is far too large holds nobody up.
    if len(msgspec.json.encode(schema)) > most or len(json.dumps(schema)) > most:
        raise ApiError(f"{param}: a schema may have at most {most} bytes", param=param)
