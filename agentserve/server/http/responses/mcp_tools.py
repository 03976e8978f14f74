"""The tools of MCP servers in a response: which there are, and what the model calls them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentserve.server.agents.records import McpServer
from agentserve.server.http.responses.item_fields import NewId
from agentserve.server.http.responses.mcp_items import LISTING
from agentserve.server.http.responses.tools import RemoteTool, Toolbox
from agentserve.server.http.schemas import FunctionDef, ToolDef
from agentserve.server.text_port import JsonObject
from tools_bridge.mcp.listing import called, taken
from tools_bridge.mcp.types import ListedTool


def listings_of(servers: Sequence[McpServer], history: Sequence[JsonObject]) -> dict[str, list[ListedTool]]:
    """By label, what was listed before: a prompt begins with it, so the first listing stays."""
    wanted = {server.label: server for server in servers}
    found: dict[str, list[ListedTool]] = {}
    for item in history:
        if item["type"] == LISTING and item["error"] is None:
            label = item["server_label"]
            if label in wanted and label not in found:
                tools = [
                    ListedTool(one["name"], one["description"] or "", one["input_schema"])
                    for one in item["tools"]
                ]
                found[label], _ = taken(tools, wanted[label].allowed)  # its client may have made it up
    return found


def listing_item(label: str, tools: Sequence[ListedTool], new_id: NewId) -> JsonObject:
    shown = [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.parameters,
            "annotations": None,
        }
        for tool in tools
    ]
    return {"id": new_id("mcpl"), "type": LISTING, "server_label": label, "tools": shown, "error": None}


def with_listings(box: Toolbox, listings: dict[str, list[ListedTool]]) -> Toolbox:
    """With the tools of its servers, behind all others."""
    names = {definition.function.name for definition in box.defs if definition.function}
    lists = [(label, [tool.name for tool in listings[label]]) for label in box.servers]
    shown = called(lists, names)
    defs, places, remote = list(box.defs), list(box.places), {}
    for label, (server, place) in box.servers.items():
        for tool in listings[label]:
            name = shown[label, tool.name]
            defs.append(ToolDef(function=FunctionDef(name, tool.description, tool.parameters, None)))
            places.append(place)
            remote[name] = RemoteTool(server, tool.name, server.asks(tool.name))
    return replace(box, defs=tuple(defs), places=tuple(places), remote=remote)
