"""MCP servers as tools of agents: what clients say of them, and what they are shown. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.server.agents.records import MOST_MCP_SECONDS, ListedMcpTool, McpServer
from agentserve.server.errors import ApiError
from agentserve.server.text_port import JsonObject

MOST_SERVERS = 16
_MOST_HEADERS, _MOST_VALUE = 32, 8192
_LABEL = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_HEADER = re.compile(r"[a-zA-Z0-9!#$%&'*+.^_`|~-]{1,128}")  # RFC 9110, 5.6.2
_VALUE = re.compile(r"[!-~](?:[ -~\t]*[!-~])?")
_OURS = frozenset(
    (
        *("host", "connection", "content-length", "content-type", "content-encoding", "accept"),
        *("accept-encoding", "transfer-encoding", "te", "trailer", "upgrade", "expect", "last-event-id"),
    )
)


def read_servers(tools: Sequence[JsonObject], place: str) -> tuple[McpServer, ...]:
    """The tools of type `mcp`. ApiError."""
    found = [
        _server(tool, f"{place}[{index}]") for index, tool in enumerate(tools) if tool.get("type") == "mcp"
    ]
    if len(found) > MOST_SERVERS:
        raise ApiError(f"{place}: at most {MOST_SERVERS} MCP servers", param=place, code="invalid_value")
    labels = [server.label for server in found]
    for label in labels:
        if labels.count(label) > 1:
            raise _bad(place, f"{label!r} is the label of two servers")
    return tuple(found)


def _server(tool: JsonObject, where: str) -> McpServer:
    """By the Agents API (`transport`), or as the Responses API writes it (`server_url`)."""
    label = tool.get("server_label")
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise _bad(f"{where}.server_label", "must be 1 to 64 of a-z A-Z 0-9 _ -")
    transport = tool.get("transport")
    headers: dict[str, str]
    if transport is None:
        url, headers = tool.get("server_url"), _headers(tool.get("headers"), f"{where}.headers")
        token = _text(tool.get("authorization"), f"{where}.authorization")
        authorization = None if token is None else f"Bearer {token}"
        named = f"{where}.server_url"
    else:
        if not isinstance(transport, dict) or transport.get("type", "http") != "http":
            raise _bad(
                f"{where}.transport", "only transports of type http are supported", "unsupported_transport"
            )
        url = transport.get("server_url")
        headers = _headers(transport.get("headers"), f"{where}.transport.headers")
        authorization = _text(transport.get("authorization"), f"{where}.transport.authorization")
        named = f"{where}.transport.server_url"
    if not isinstance(url, str):
        raise _bad(named, "must be the URL of a server")
    if authorization is not None:
        headers = {name: value for name, value in headers.items() if name != "authorization"}
        headers["authorization"] = authorization
    for field, usual in (("credential_id", None), ("connector_id", None), ("connection_origin", "service")):
        if tool.get(field) not in (None, usual):
            raise _bad(f"{where}.{field}", "is not supported", "unsupported_value")
    approve_all, approve, trusted = _approval(tool.get("require_approval"), f"{where}.require_approval")
    timeout = tool.get("timeout")
    if timeout is not None and not (
        isinstance(timeout, int | float)
        and not isinstance(timeout, bool)
        and math.isfinite(timeout)
        and 0 < timeout <= MOST_MCP_SECONDS
    ):
        raise _bad(f"{where}.timeout", f"must be above 0 and at most {MOST_MCP_SECONDS:g} seconds")
    required = tool.get("required") or False
    if not isinstance(required, bool):
        raise _bad(f"{where}.required", "must be true or false")
    return McpServer(
        label=label,
        url=url,
        headers=headers,
        allowed=_allowed(tool.get("allowed_tools"), f"{where}.allowed_tools"),
        approve_all=approve_all,
        approve=approve,
        trusted=trusted,
        required=required,
        timeout=None if timeout is None else float(timeout),
    )


def _headers(given: object, where: str) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > _MOST_HEADERS:
        raise _bad(where, f"must be at most {_MOST_HEADERS} names with their values")
    found: dict[str, str] = {}
    for name, value in given.items():
        low = str(name).lower()
        if not _HEADER.fullmatch(low) or low in _OURS or low.startswith(("mcp-", "proxy-")):
            raise _bad(where, f"{low[:80]!r} cannot be set")
        _text(value, f"{where}.{low}")
        if low in found:
            raise _bad(where, f"{low[:80]!r} is there twice")
        found[low] = value
    return found


def _text(value: object, where: str) -> str | None:
    """What may stand in a header. Never shown again, not even where it is wrong."""
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _MOST_VALUE or not _VALUE.fullmatch(value):
        raise _bad(where, f"must be text of at most {_MOST_VALUE} printable ASCII characters")
    return value


def _names(given: object, where: str) -> tuple[str, ...]:
    names = given.get("tool_names") if isinstance(given, Mapping) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _bad(where, "must be names of tools")
    return tuple(sorted(set(names)))


def _allowed(given: object, where: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, Mapping) and given.get("read_only") is not None:
        raise _bad(f"{where}.read_only", "is not supported", "unsupported_value")
    return _names(given, where)


def _approval(given: Any, where: str) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Whether calls need approval, tools that do, tools that do not. As at OpenAI all do, where nothing
    is said of them; where only tools that do are named, the others do not."""
    if given is None or given == "always":
        return True, (), ()
    if given == "never":
        return False, (), ()
    if not isinstance(given, Mapping) or not given or set(given) - {"always", "never"}:
        raise _bad(where, "must be always, never, or names of tools under these")
    always = _names(given["always"], f"{where}.always") if given.get("always") is not None else ()
    never = _names(given["never"], f"{where}.never") if given.get("never") is not None else ()
    return (
        given.get("always") is None or given.get("never") is not None,
        always,
        tuple(name for name in never if name not in always),
    )


def _bad(where: str, why: str, code: str = "invalid_value") -> ApiError:
    return ApiError(f"{where}: {why}", param=where, code=code)


def server_object(server: McpServer) -> JsonObject:
    """Without headers, and without what stands behind the path of its URL: keys may be there."""
    shown: JsonObject = {
        "type": "mcp",
        "server_label": server.label,
        "transport": {"type": "http", "server_url": server.url.partition("?")[0], "headers": {}},
        "allowed_tools": None if server.allowed is None else list(server.allowed),
        "require_approval": shown_approval(server),
        "connection_origin": "service",
        "credential_id": None,
        "request_metadata": {},
        "required": server.required,
    }
    if server.timeout is not None:
        shown["timeout"] = server.timeout
    return shown


def shown_approval(server: McpServer) -> object:
    if not (server.approve or server.trusted):
        return "always" if server.approve_all else "never"
    lists = {"always": server.approve, "never": server.trusted}
    return {name: {"tool_names": list(tools)} for name, tools in lists.items() if tools}


def listed_object(tool: ListedMcpTool) -> JsonObject:
    return {
        "name": tool.remote,
        "description": tool.description,
        "input_schema": tool.parameters,
        "annotations": None,
    }
