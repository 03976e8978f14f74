"""Tools of MCP servers: their listings, and calls of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from agentserve.server.agents.fold import NewId
from agentserve.server.agents.history import History
from agentserve.server.agents.places import Places
from agentserve.server.agents.records import MOST_MCP_SECONDS, ListedMcpTool, ListingItem, McpServer
from agentserve.server.agents.runners import ToolCall, ToolOutcome
from tools_bridge.mcp.listing import called, taken
from tools_bridge.mcp.types import ListedTool, Mcp, McpFailed, Place

log = logging.getLogger(__name__)

LIST_SECONDS = 10.0
CALL_SECONDS = 60.0  # where the server's definition says nothing
FAILED = "The tool failed."
MOST_CALLS, MOST_LISTINGS = 128, 32  # at once, of all tenants: each has connections of its own
TENANT_CALLS, TENANT_LISTINGS = 32, 8
Said = TypeVar("Said")


class ServerMissing(Exception):
    """A server that no turn begins without has no listing."""


class McpTools:
    """A `ToolRunner`."""

    lasting = False  # a call may have had its effect

    def __init__(self, mcp: Mcp) -> None:
        self._mcp = mcp
        self._calls = Places(TENANT_CALLS, MOST_CALLS)
        self._listings = Places(TENANT_LISTINGS, MOST_LISTINGS)  # never behind calls, which may take long
        self._under_way: set[asyncio.Task[object]] = set()  # those that nobody waits for among them

    async def listings(self, history: History, new_id: NewId) -> list[ListingItem]:
        """Of servers that the session has none of yet, asked all at once. ServerMissing."""
        servers = history.head.config.servers
        fresh = [server for server in servers if history.listing(server) is None]
        if not fresh:
            return []
        found = await self.ask(fresh, history.head.tenant)
        for server, listed in zip(fresh, found, strict=True):
            if server.required and isinstance(listed, str):
                raise ServerMissing(f"{server.label}: {listed}")
        return _items(history, fresh, found, new_id)

    async def ask(self, servers: Sequence[McpServer], owner: str) -> list[list[ListedTool] | str]:
        """For each, its tools, or why there are none. `owner`: the tenant."""
        return list(await asyncio.gather(*(self._list(server, owner) for server in servers)))

    async def _list(self, server: McpServer, owner: str) -> list[ListedTool] | str:
        try:
            place = Place(server.url, server.headers)
            listed = await self._in_place(
                self._listings, owner, lambda: self._mcp.list_tools(place, LIST_SECONDS)
            )
            tools, left_out = await asyncio.to_thread(taken, listed, server.allowed)
        except McpFailed as error:
            log.warning("the tools of MCP server %r are not there: %s", server.label, error.fault)
            return str(error)
        if left_out:
            log.warning("%d tool(s) of MCP server %r are left out", left_out, server.label)
        return tools

    def settled(self, call: ToolCall) -> None:
        pass

    async def run(self, call: ToolCall) -> ToolOutcome:
        server = call.server
        if server is None:
            return ToolOutcome(error=f"The session has no MCP server {call.item.server!r} any more.")
        try:
            arguments = json.loads(call.item.arguments or "{}", parse_constant=_refuse)
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # half a surrogate pair among them
            arguments = None
        if not isinstance(arguments, dict):
            return ToolOutcome(error="Bad arguments. They are no JSON object.")
        seconds = CALL_SECONDS if server.timeout is None else server.timeout
        seconds = min(seconds, MOST_MCP_SECONDS)  # agents that were made before there was a bound
        try:
            place, name = Place(server.url, server.headers), call.item.remote
            answer = await self._in_place(
                self._calls, call.owner, lambda: self._mcp.call(place, name, arguments, seconds)
            )
        except McpFailed as error:
            return ToolOutcome(error=str(error))
        return ToolOutcome(error=answer.text or FAILED) if answer.failed else ToolOutcome(answer.text)

    async def _in_place(self, places: Places, owner: str, work: Callable[[], Awaitable[Said]]) -> Said:
        """Who is cancelled does not wait until a server was left. The place is taken till then: its
        connections are."""

        async def placed() -> Said:
            async with places.one(owner):
                return await work()

        task = asyncio.ensure_future(placed())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await _Apart(task)


class _Apart(asyncio.Future[Said]):
    """What a task comes to. Who stops waiting has it cancelled, and does not wait for its end."""

    def __init__(self, task: asyncio.Task[Said]) -> None:
        super().__init__()
        self._task = task
        task.add_done_callback(self._end)

    def cancel(self, msg: str | None = None) -> bool:
        self._task.cancel(msg)
        return super().cancel(msg)

    def _end(self, task: asyncio.Task[Said]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.done():
            return
        if task.cancelled():
            super().cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _items(
    history: History, fresh: Sequence[McpServer], found: Sequence[list[ListedTool] | str], new_id: NewId
) -> list[ListingItem]:
    names = {tool.name for tool in history.config.tools}
    lists = [
        (server, [] if isinstance(listed, str) else listed)
        for server, listed in zip(fresh, found, strict=True)
    ]
    shown = called([(server.label, [tool.name for tool in tools]) for server, tools in lists], names)
    items = []
    for (server, tools), listed in zip(lists, found, strict=True):
        listing = tuple(
            ListedMcpTool(shown[server.label, tool.name], tool.name, tool.description, tool.parameters)
            for tool in tools
        )
        error = listed if isinstance(listed, str) else None
        items.append(ListingItem(new_id("mcpl"), server.label, server.key, listing, error))
    return items
