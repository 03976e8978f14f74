"""From bodies of the Agents API to what is kept of an agent, and from that to a chat request. Pure."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from agentserve.server.agents.records import AgentConfig, AgentTool, Output
from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.errors import ApiError
from agentserve.server.http.agents.schemas import AgentFields, Input, InputMessage, ResultInput, ToolChoice
from agentserve.server.http.agents.servers import read_servers
from agentserve.server.http.left_out import listed
from agentserve.server.http.promised import SaidSlo, patient
from agentserve.server.http.schemas import (
    ChatRequest,
    FunctionDef,
    JsonSchemaFormat,
    NamedChoice,
    ResponseFormat,
    SloFields,
    ToolDef,
)
from agentserve.server.http.tool_choice import NOT_OFFERED, tool_choice
from agentserve.server.text_port import JsonObject
from agentserve.tools import Tool

log = logging.getLogger(__name__)

MOST_TIMEOUT = 1e6  # seconds
MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512
SETTINGS = ("temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "tool_choice", "slo")
FAILED = "The tool failed."

BLANK = AgentConfig(id="", model="")


def configured(
    base: AgentConfig, fields: AgentFields, registered: Mapping[str, Tool], place: str = "agent"
) -> AgentConfig:
    """`base` with what `fields` say. ApiError."""
    changes: dict[str, object] = {}
    if fields.model is not UNSET:
        changes["model"] = fields.model
    for name in ("name", "instructions", "webhook"):
        given = getattr(fields, name)
        if given is not UNSET:
            changes[name] = given
    if fields.service_tier is not UNSET:
        changes["service_tier"] = fields.service_tier or "auto"
    if fields.tools is not UNSET:
        changes["tools"] = read_tools(fields.tools or (), registered, f"{place}.tools")
        changes["servers"] = read_servers(fields.tools or (), f"{place}.tools")
    if fields.reasoning is None:
        changes |= {"effort": None, "summary": None}
    elif fields.reasoning is not UNSET:
        if fields.reasoning.effort is not UNSET:
            changes["effort"] = fields.reasoning.effort
        if fields.reasoning.summary is not UNSET:
            changes["summary"] = fields.reasoning.summary
    if fields.text is None:
        changes |= {"schema": None, "verbosity": "medium"}
    elif fields.text is not UNSET:
        wanted = fields.text.format
        if wanted is not None and wanted.type == "json_schema" and wanted.schema is None:
            raise ApiError(f"{place}.text.format.schema: missing", param=f"{place}.text.format.schema")
        schema = wanted.schema if wanted is not None and wanted.type == "json_schema" else None
        changes |= {"schema": schema, "verbosity": fields.text.verbosity or "medium"}
    changes["settings"] = _settings(base.settings, fields)
    config = msgspec.structs.replace(base, **changes)
    _check_choice(config, fields, place)
    return config


def _settings(before: JsonObject, fields: AgentFields) -> JsonObject:
    settings = dict(before)
    given = {name: getattr(fields, name) for name in SETTINGS}
    given["max_completion_tokens"] = fields.max_output_tokens
    for name, value in given.items():
        if value is None:
            settings.pop(name, None)
        elif value is not UNSET:
            settings[name] = msgspec.to_builtins(value.plain() if isinstance(value, ToolChoice) else value)
    return settings


def _choice(config: AgentConfig) -> str | NamedChoice | None:
    choice = config.settings.get("tool_choice")
    return msgspec.convert(choice, NamedChoice) if isinstance(choice, dict) else choice


def said_of(config: AgentConfig) -> SaidSlo:
    """What its turns are to be promised."""
    raw = config.settings.get("slo")
    return msgspec.convert(raw, SloFields) if isinstance(raw, dict) else raw if isinstance(raw, str) else None


def _check_choice(config: AgentConfig, fields: AgentFields, place: str) -> None:
    """What is said of it, before a turn fails of it. What tools MCP servers have is known only then."""
    if fields.tool_choice is UNSET and fields.tools is UNSET:
        return
    try:
        tool_choice(_choice(config), [{"function": {"name": tool.name}} for tool in config.tools])
    except ApiError as error:
        if error.code == NOT_OFFERED and config.servers:
            return
        told = f"{place}.{error.message}"
        raise ApiError(told, param=f"{place}.tool_choice", code=error.code) from None


def read_tools(
    tools: Sequence[JsonObject], registered: Mapping[str, Tool], place: str
) -> tuple[AgentTool, ...]:
    """Tools of kinds that this server does not run are left out, with a line in the log. ApiError."""
    found: list[AgentTool] = []
    left_out: list[str] = []
    for index, tool in enumerate(tools):
        where = f"{place}[{index}]"
        kind = tool.get("type", "function")
        if kind == "function":
            found.append(_function(tool, where))
        elif kind == "webhook":
            found.append(_delivered(tool, where))
        elif kind == "python":
            found.append(_registered(tool, registered, where))
        elif kind != "mcp":  # `read_servers`
            left_out.append(str(kind))
    if left_out:
        log.warning("tools of agents are left out: %s", listed(left_out))
    for name, count in Counter(tool.name for tool in found).items():
        if count > 1:
            raise ApiError(f"{place}: {name!r} is defined twice", param=place)
    return tuple(found)


def _function(tool: JsonObject, where: str) -> AgentTool:
    for key, kind, told in (
        ("name", str, "a string"),
        ("description", str | None, "a string"),
        ("parameters", dict | None, "a JSON schema"),
        ("strict", bool | None, "true or false"),
        ("async", bool | None, "true or false"),
        ("defer_loading", bool | None, "true or false"),
        ("timeout", int | float | None, "seconds"),
    ):
        if not isinstance(tool.get(key), kind) or (key == "timeout" and isinstance(tool.get(key), bool)):
            raise ApiError(f"{where}.{key}: must be {told}", param=f"{where}.{key}", code="invalid_value")
    timeout = tool.get("timeout")
    if timeout is not None and not (math.isfinite(timeout) and 0 < timeout <= MOST_TIMEOUT):
        raise ApiError(
            f"{where}.timeout: must be above 0 and at most {MOST_TIMEOUT:g} seconds", param=f"{where}.timeout"
        )
    return AgentTool(
        kind="function",
        name=tool["name"],
        description=tool.get("description") or "",
        parameters=tool.get("parameters") or {"type": "object", "properties": {}},
        strict=tool.get("strict"),
        background=bool(tool.get("async")),
        defer_loading=bool(tool.get("defer_loading")),
        timeout=None if timeout is None else float(timeout),
    )


def _delivered(tool: JsonObject, where: str) -> AgentTool:
    """A webhook tool: a function, and whom its calls are delivered to."""
    made = _function(tool, where)
    if made.background:
        raise ApiError(f"{where}.async: not for webhook tools", param=f"{where}.async", code="invalid_value")
    webhook = tool.get("webhook")
    if not isinstance(webhook, str | None):
        raise ApiError(f"{where}.webhook: must be an endpoint's id or URL", param=f"{where}.webhook")
    return msgspec.structs.replace(made, kind="webhook", webhook=webhook)


def _registered(tool: JsonObject, registered: Mapping[str, Tool], where: str) -> AgentTool:
    name = tool.get("name")
    made = registered.get(name) if isinstance(name, str) else None
    if made is None:
        raise ApiError(
            f"{where}.name: this server has no Python tool {str(name)[:80]!r}",
            param=f"{where}.name",
            code="unknown_tool",
        )
    return AgentTool(
        kind="python",
        name=made.name,
        description=made.description,
        parameters=made.parameters,
        timeout=made.timeout,
    )


def check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    if len(metadata) > MOST_METADATA:
        raise ApiError(f"metadata: at most {MOST_METADATA} keys", param="metadata")
    if any(len(key) > _MOST_KEY or len(value) > _MOST_VALUE for key, value in metadata.items()):
        raise ApiError(
            f"metadata: keys have at most {_MOST_KEY} characters, values {_MOST_VALUE}", param="metadata"
        )
    return dict(metadata)


def input_texts(given: Input, place: str = "input") -> list[list[str]]:
    """The texts of each message. ApiError."""
    messages = [InputMessage(given)] if isinstance(given, str) else given
    if not messages:
        raise ApiError(f"{place}: must not be empty", param=place, code="invalid_value")
    found = []
    for index, message in enumerate(messages):
        where = f"{place}[{index}].content"
        texts = [message.content] if isinstance(message.content, str) else _texts(message.content, where)
        if not any(texts):
            raise ApiError(f"{where}: must not be empty", param=where, code="invalid_value")
        found.append(texts)
    return found


def _texts(parts: Sequence[JsonObject], where: str) -> list[str]:
    texts = []
    for index, part in enumerate(parts):
        if part.get("type") != "input_text" or not isinstance(part.get("text"), str):
            raise ApiError(
                f"{where}[{index}]: only parts of type input_text, with a text, are supported",
                param=f"{where}[{index}]",
                code="unsupported_content",
            )
        texts.append(part["text"])
    return texts


def outcome_of(result: ResultInput, place: str) -> ToolOutcome:
    """ApiError."""
    if not result.success:
        return ToolOutcome(error=result.error or FAILED)
    output: Output = ""
    if isinstance(result.output, str):
        output = result.output
    elif result.output:
        texts = _texts(result.output, f"{place}.output")
        output = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return ToolOutcome(output)


def chat_request(config: AgentConfig, messages: list[JsonObject], *, first: bool) -> ChatRequest:
    """The model call. `first`: of a turn; in a later one a choice that forces a call would force one after
    the other."""
    settings = dict(config.settings)
    choice = _choice(config)
    settings.pop("tool_choice", None)
    settings.pop("slo", None)
    slo = said_of(config)
    if choice is not None and not first and choice != "none":
        choice = "auto"
    schema = config.schema
    return ChatRequest(
        model=config.model,
        messages=messages,
        tools=[
            ToolDef(
                function=FunctionDef(tool.name, tool.description or None, tool.parameters, tool.strict),
                defer_loading=tool.defer_loading or None,
            )
            for tool in config.tools
        ]
        or None,
        tool_choice=choice,
        reasoning_effort=config.effort,
        response_format=None
        if schema is None
        else ResponseFormat("json_schema", JsonSchemaFormat("answer", schema, True)),
        slo=slo if first else patient(slo),
        service_tier=config.service_tier,
        **settings,
    )
