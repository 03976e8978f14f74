"""MCP servers, for whoever has tools there. The `mcp` package is loaded when it is first needed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tools_bridge.mcp.results import Unread
from tools_bridge.mcp.types import Answer, Fault, JsonObject, ListedTool, McpFailed, Place
from tools_bridge.webhooks.address import AddressPolicy, parse
from tools_bridge.webhooks.dial import Resolver, SystemResolver

if TYPE_CHECKING:
    from tools_bridge.mcp.client import McpClient

MOST_AT_ONCE = 256  # operations, those among them that are over but for their goodbyes
MISSING = "this server is installed without the extra `mcp`: pip install 'agentserve-llm[mcp]'"


def installed() -> bool:
    return importlib.util.find_spec("mcp") is not None and importlib.util.find_spec("mcp_types") is not None


class RemoteMcp:
    """An `Mcp`."""

    def __init__(
        self, policy: AddressPolicy, unread: Unread, *, version: str = "0", resolver: Resolver | None = None
    ) -> None:
        self.policy = policy
        self._unread = unread
        self._version = version
        self._resolver = resolver or SystemResolver()
        self._client: McpClient | None = None
        self._under_way = 0

    def check(self, url: str) -> None:
        if not installed():
            raise McpFailed(Fault.REFUSED, MISSING)
        parse(url, self.policy)

    async def list_tools(self, place: Place, seconds: float) -> list[ListedTool]:
        async with self._one_more():
            return await (await self._made()).list_tools(place, seconds)

    async def call(self, place: Place, tool: str, arguments: JsonObject, seconds: float) -> Answer:
        async with self._one_more():
            return await (await self._made()).call(place, tool, arguments, seconds)

    @asynccontextmanager
    async def _one_more(self) -> AsyncIterator[None]:
        leaving = 0 if self._client is None else self._client.leaving
        if self._under_way + leaving >= MOST_AT_ONCE:
            raise McpFailed(Fault.UNREACHABLE, "This server asks too many MCP servers at once.")
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def _made(self) -> McpClient:
        if not installed():
            raise McpFailed(Fault.REFUSED, MISSING)
        if self._client is None:
            made = await asyncio.to_thread(self._make)
            self._client = self._client or made
        return self._client

    def _make(self) -> McpClient:
        from tools_bridge.mcp.client import McpClient

        return McpClient(self.policy, self._resolver, self._unread, version=self._version)
