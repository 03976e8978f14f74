"""The tools of a request: flat function definitions, groups of them, and kinds that run elsewhere.

A group (`namespace`) is flattened: the model sees `<namespace>__<name>`, the client gets its own two names
back. Tools of MCP servers are known once they are listed (`mcp_tools.py`). Kinds that this server cannot
run are skipped, as agents send them unasked. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentserve.server.agents.records import McpServer
from agentserve.server.errors import ApiError
from agentserve.server.http.agents.servers import read_servers, shown_approval
from agentserve.server.http.schemas import (
    AllowedTool,
    AllowedTools,
    FunctionDef,
    FunctionName,
    NamedChoice,
    ToolDef,
)
from agentserve.server.text_port import JsonObject

MOST_NAME_CHARS = 64
_OTHER = re.compile(r"[^a-zA-Z0-9_-]")
_DIGEST_CHARS = 8


@dataclass(frozen=True, slots=True)
class RemoteTool:
    server: McpServer
    name: str  # what its server calls it
    approval: bool  # each call is shown to a user first


@dataclass(frozen=True, slots=True)
class Toolbox:
    """`names`: of those that are told otherwise than the client wrote them, (name, namespace)."""

    defs: tuple[ToolDef, ...] = ()
    places: tuple[str, ...] = ()  # of each of them, in the request
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    shown: tuple[JsonObject, ...] = ()  # what the response says that there was
    skipped: tuple[str, ...] = ()  # kinds that were left out
    servers: dict[str, tuple[McpServer, str]] = field(default_factory=dict)  # by label, with their places
    remote: dict[str, RemoteTool] = field(default_factory=dict)  # by what the model calls them

    @property
    def remote_names(self) -> dict[tuple[str, str], str]:
        return {(tool.server.label, tool.name): shown for shown, tool in self.remote.items()}

    def told(self, name: str) -> JsonObject:
        """A called function as its client knows it: `name`, and `namespace` where it has one."""
        if name not in self.names:
            return {"name": name}
        own, namespace = self.names[name]
        return {"name": own, "namespace": namespace}


def flat_name(namespace: str, name: str) -> str:
    """What the model calls a function of a group: of the characters that names may have, and no longer
    than they may be."""
    flat = _OTHER.sub("_", f"{namespace}__{name}")
    if len(flat) <= MOST_NAME_CHARS:
        return flat
    digest = hashlib.sha256(f"{namespace}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{flat[: MOST_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest[:_DIGEST_CHARS]}"


def read_tools(tools: Sequence[JsonObject] | None) -> Toolbox:
    """ApiError for a function that is not one."""
    defs: list[ToolDef] = []
    places: list[str] = []
    names: dict[str, tuple[str, str]] = {}
    shown: list[JsonObject] = []
    skipped: list[str] = []
    servers = {server.label: server for server in read_servers(tools or (), "tools")}
    found: dict[str, tuple[McpServer, str]] = {}
    for index, tool in enumerate(tools or ()):
        place = f"tools[{index}]"
        kind = tool.get("type")
        if kind == "function":
            function = _function(tool, place)
            defs.append(ToolDef(function=function))
            places.append(place)
            shown.append(_shown(function))
        elif kind == "namespace":
            group, inner, left_out = _group(tool, place)
            for function, inner_place in inner:
                flat = flat_name(group, function.name)
                names[flat] = (function.name, group)
                defs.append(ToolDef(function=_renamed(function, flat)))
                places.append(inner_place)
            skipped += left_out
            shown.append(tool)
        elif kind == "mcp":
            server = servers[tool["server_label"]]
            found[server.label] = server, place
            shown.append(_shown_server(server))
        else:
            skipped.append(str(kind)[:40])
    return Toolbox(tuple(defs), tuple(places), names, tuple(shown), tuple(skipped), found)


def read_choice(choice: str | JsonObject | None, box: Toolbox) -> str | NamedChoice | None:
    """The choice as chat completions know it. ApiError where it asks for what there is not."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return NamedChoice("function", FunctionName(_chosen(choice, box, "tool_choice")))
    if kind == "mcp":
        names = _of_server(choice, box, "tool_choice")
        if len(names) == 1:
            return NamedChoice("function", FunctionName(names[0]))
        return NamedChoice(
            "allowed_tools", allowed_tools=AllowedTools("required", list(map(_allowed, names)))
        )
    if kind != "allowed_tools":
        raise ApiError(
            f"tool_choice.type: {str(kind)[:40]!r} is not one of function, mcp, allowed_tools",
            param="tool_choice.type",
            code="unsupported_tool",
        )
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise ApiError("tool_choice.mode: must be auto or required", param="tool_choice.mode")
    if not isinstance(listed, list) or not listed:
        raise ApiError("tool_choice.tools: must be a list of tools", param="tool_choice.tools")
    allowed: list[AllowedTool] = []
    for index, tool in enumerate(listed):
        place = f"tool_choice.tools[{index}]"
        if not isinstance(tool, dict):
            raise ApiError(f"{place}: an object is expected", param=place)
        if tool.get("type") == "function":
            allowed.append(_allowed(_chosen(tool, box, place)))
        elif tool.get("type") == "mcp":
            allowed += map(_allowed, _of_server(tool, box, place))
    return NamedChoice("allowed_tools", allowed_tools=AllowedTools(mode, allowed))


def unforced(choice: str | NamedChoice | None) -> str | NamedChoice | None:
    """For the model calls of a response after its first: one that forces a call would force it again."""
    if choice is None or choice in ("auto", "none"):
        return choice
    allowed = choice.allowed_tools if isinstance(choice, NamedChoice) else None
    if allowed is None:
        return "auto"
    return NamedChoice("allowed_tools", allowed_tools=AllowedTools("auto", allowed.tools))


def _chosen(tool: JsonObject, box: Toolbox, place: str) -> str:
    name, namespace = tool.get("name"), tool.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = flat_name(namespace, name)
    known = {definition.function.name for definition in box.defs if definition.function}
    if not isinstance(name, str) or name not in known:
        raise ApiError(f"{place}.name: {str(name)[:80]!r} is not among the tools", param=f"{place}.name")
    return name


def _allowed(name: str) -> AllowedTool:
    return AllowedTool(name=name)


def _of_server(tool: JsonObject, box: Toolbox, place: str) -> list[str]:
    """What the model calls a tool of an MCP server, or all of them."""
    label, name = tool.get("server_label"), tool.get("name")
    names = [
        shown
        for shown, remote in box.remote.items()
        if remote.server.label == label and name in (None, remote.name)
    ]
    if not names:
        what = f"{str(label)[:64]!r}" if name is None else f"{str(name)[:80]!r} of {str(label)[:64]!r}"
        raise ApiError(f"{place}: {what} is not among the tools", param=place)
    return names


def _function(tool: JsonObject, place: str) -> FunctionDef:
    name, parameters = tool.get("name"), tool.get("parameters")
    description, strict = tool.get("description"), tool.get("strict")
    for key, value, kind, told in (
        ("name", name, str, "a string"),
        ("parameters", parameters, dict, "a JSON schema"),
        ("description", description, str, "a string"),
        ("strict", strict, bool, "true or false"),
    ):
        if not (isinstance(value, kind) or (value is None and key != "name")):
            raise ApiError(f"{place}.{key}: must be {told}", param=f"{place}.{key}", code="invalid_value")
    assert isinstance(name, str)
    return FunctionDef(name, description, parameters, strict)


def _group(tool: JsonObject, place: str) -> tuple[str, list[tuple[FunctionDef, str]], list[str]]:
    """Its name, its functions and their places, and kinds in it that were left out."""
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise ApiError(f"{place}.name: must be a string", param=f"{place}.name", code="invalid_value")
    if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
        raise ApiError(
            f"{place}.tools: must be a list of tools", param=f"{place}.tools", code="invalid_value"
        )
    functions = [
        (_function(one, f"{place}.tools[{index}]"), f"{place}.tools[{index}]")
        for index, one in enumerate(inner)
        if one.get("type") == "function"
    ]
    return name, functions, [str(one.get("type"))[:40] for one in inner if one.get("type") != "function"]


def _renamed(function: FunctionDef, name: str) -> FunctionDef:
    return FunctionDef(name, function.description, function.parameters, function.strict)


def _shown(function: FunctionDef) -> JsonObject:
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": function.strict,
    }


def _shown_server(server: McpServer) -> JsonObject:
    """Without headers, and without what stands behind the path of its URL: keys may be there."""
    return {
        "type": "mcp",
        "server_label": server.label,
        "server_url": server.url.partition("?")[0],
        "allowed_tools": None if server.allowed is None else list(server.allowed),
        "require_approval": shown_approval(server),
        "headers": None,
    }
