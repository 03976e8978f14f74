"""What a response needs of MCP servers before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.server.errors import ApiError
from agentserve.server.http.agents.lookup import check_server
from agentserve.server.http.context import ServerContext
from agentserve.server.http.responses.desk import new_id
from agentserve.server.http.responses.mcp_items import REQUEST, RESPONSE, answers
from agentserve.server.http.responses.mcp_tools import listing_item, listings_of, with_listings
from agentserve.server.http.responses.tools import Toolbox
from agentserve.server.text_port import JsonObject


async def with_servers(
    context: ServerContext, tenant: str, box: Toolbox, history: Sequence[JsonObject]
) -> tuple[Toolbox, list[JsonObject]]:
    """The tools of its servers too, as the history has them; servers that it does not know are asked, and
    their listings are items. ApiError."""
    if not box.servers:
        return box, []
    servers = [server for server, _ in box.servers.values()]
    for server in servers:
        check_server(context, server)
    listings = await context.off_loop(listings_of, servers, history)
    fresh = [server for server in servers if server.label not in listings]
    for server, listed in zip(fresh, await context.agents.means.mcp.ask(fresh, tenant), strict=True):
        if isinstance(listed, str):
            raise ApiError(
                f"{box.servers[server.label][1]}: the tools of {server.label!r} cannot be had: {listed}",
                status=424,
                param="tools",
                code="mcp_server_unavailable",
            )
        listings[server.label] = listed
    items = [listing_item(server.label, listings[server.label], new_id) for server in fresh]
    return await context.off_loop(with_listings, box, listings), items


def check_approvals(
    history: Sequence[JsonObject], items: Sequence[JsonObject], places: Sequence[str]
) -> None:
    """What a request says to calls that were to be approved fits them. ApiError."""
    if not any(item["type"] == RESPONSE for item in items):
        return
    everything = [*history, *items]
    requests = {item["id"] for item in everything if item["type"] == REQUEST}
    first = answers(everything)
    for item, place in zip(items, places, strict=True):
        if item["type"] != RESPONSE:
            continue
        id_, param = item["approval_request_id"], f"{place}.approval_request_id"
        if id_ not in requests:
            raise ApiError(
                f"{param}: no approval is asked for as {id_[:80]!r}",
                param=param,
                code="unknown_approval_request",
            )
        if first[id_]["approve"] != item["approve"]:
            raise ApiError(
                f"{param}: {id_[:80]!r} has another decision already",
                status=409,
                param=param,
                code="decision_conflict",
            )
