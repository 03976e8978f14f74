"""One operation at an MCP server: connect, agree on a version, ask, leave.

Each has connections of its own: by the newest version of the protocol there is no session to keep, and of
older servers' sessions an agent knows nothing. Whatever a server does, what is raised is McpFailed.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2
import mcp_types
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from pydantic import TypeAdapter, ValidationError

from tools_bridge.mcp.network import PinnedBackend, Seen, Wire
from tools_bridge.mcp.results import Unread, answer, reason, secrets_of, without
from tools_bridge.mcp.sieve import sieve
from tools_bridge.mcp.types import Answer, Fault, JsonObject, ListedTool, McpFailed, Place
from tools_bridge.webhooks.address import AddressPolicy, Refused, parse
from tools_bridge.webhooks.dial import NotResolved, Resolver, addresses_of

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
LIST_BYTES = 2 << 20  # read of a server for one listing
LIST_PARTS = 100_000  # of these bytes: they are parsed and checked in one go, on the event loop
CALL_BYTES = 8 << 20
CALL_PARTS = 50_000
MOST_PAGES = 32
GRACE_SECONDS = 2.0  # that leaving a server may take

Sleep = Callable[[float], Awaitable[object]]
Result = TypeVar("Result")

_RESULT: TypeAdapter[Any] = TypeAdapter(mcp_types.CallToolResult | mcp_types.InputRequiredResult)


class McpClient:
    """`unread`: what a model reads instead of what is no text. `trust`: which certificates are believed;
    None: the machine's."""

    def __init__(
        self,
        policy: AddressPolicy,
        resolver: Resolver,
        unread: Unread,
        *,
        version: str = "0",
        trust: ssl.SSLContext | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._unread = unread
        self._info = mcp_types.Implementation(name="agentserve", version=version)
        self._trust = trust
        self._sleep = sleep
        self._leaving: set[asyncio.Task[Any]] = set()  # operations that are over, but for their goodbyes
        for name in ("mcp", "httpx2", "httpcore2"):  # they log URLs, and what servers sent
            logging.getLogger(name).setLevel(logging.CRITICAL)

    @property
    def leaving(self) -> int:
        return len(self._leaving)

    async def list_tools(self, place: Place, seconds: float) -> list[ListedTool]:
        return await self._bounded(self._list(place, seconds), seconds)

    async def call(self, place: Place, tool: str, arguments: JsonObject, seconds: float) -> Answer:
        return await self._bounded(self._call(place, tool, arguments, seconds), seconds)

    async def _list(self, place: Place, seconds: float) -> list[ListedTool]:
        async with self._connected(place, seconds, LIST_BYTES, LIST_PARTS) as client:
            return [
                ListedTool(tool.name, tool.description or "", dict(tool.input_schema))
                for tool in await _all_tools(client)
            ]

    async def _call(self, place: Place, tool: str, arguments: JsonObject, seconds: float) -> Answer:
        async with self._connected(place, seconds, CALL_BYTES, CALL_PARTS) as client:
            try:
                result = await _sent(client, tool, arguments)
            except MCPError as error:
                if error.error.code != mcp_types.HEADER_MISMATCH:
                    raise
                await _all_tools(client)  # it wants arguments in headers, as its listing says which
                result = await _sent(client, tool, arguments)
            if not isinstance(result, mcp_types.CallToolResult):
                raise McpFailed(
                    Fault.PROTOCOL, "The tool asks for more input, which this server does not give."
                )
            return await asyncio.to_thread(self._read, result, place)

    def _read(self, result: mcp_types.CallToolResult, place: Place) -> Answer:
        blocks = [block.model_dump(by_alias=True, mode="json") for block in result.content]
        found = answer(blocks, result.structured_content, failed=bool(result.is_error), unread=self._unread)
        return Answer(without(found.text, secrets_of(place.headers)), found.failed)

    @asynccontextmanager
    async def _connected(self, place: Place, seconds: float, most: int, parts: int) -> AsyncIterator[Client]:
        seen = Seen(most, parts)
        try:
            target = parse(place.url, self._policy)
            addresses = await addresses_of(target, self._policy, self._resolver)
            if target.secure and self._trust is None:
                self._trust = await asyncio.to_thread(ssl.create_default_context)  # it reads files
            wire = Wire(PinnedBackend(target.host, target.port, addresses, seen), self._trust, seen)
            http = httpx2.AsyncClient(
                transport=wire,
                headers={"user-agent": "AgentServe", **place.headers, "accept-encoding": "identity"},
                timeout=httpx2.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds)),
                trust_env=False,
                follow_redirects=False,
                max_redirects=0,
            )
            url = f"{target.scheme}://{target.authority}{target.target}"
            async with http:
                transport = streamable_http_client(url, http_client=http, max_sse_event_size=most)
                async with Client(sieve(transport), client_info=self._info, cache=None) as client:
                    yield client
        except Exception as error:
            raise _failed(error, seen, secrets_of(place.headers)) from None

    async def _bounded(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        """Within its time, however the server takes it that it is left. Who is cancelled waits until it was
        left, for as long as that may take."""
        task = asyncio.ensure_future(work)
        timer = asyncio.ensure_future(self._sleep(seconds))
        try:
            await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._leave(task)
            await asyncio.wait({task}, timeout=GRACE_SECONDS)  # its connections count until it has left
            raise McpFailed(Fault.TIMEOUT, f"The MCP server did not answer within {seconds:g} s.")
        except asyncio.CancelledError:
            if not task.done() and task not in self._leaving:
                self._leave(task)
                await asyncio.wait({task}, timeout=2 * GRACE_SECONDS)
            raise
        finally:
            timer.cancel()
            if not task.done() and task not in self._leaving:
                self._leave(task)

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._leaving.add(task)
        task.add_done_callback(self._left)
        task.cancel()
        asyncio.get_running_loop().call_later(GRACE_SECONDS, task.cancel)

    def _left(self, task: asyncio.Task[Any]) -> None:
        self._leaving.discard(task)
        if not task.cancelled():
            task.exception()


async def _all_tools(client: Client) -> list[mcp_types.Tool]:
    tools: list[mcp_types.Tool] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise McpFailed(Fault.PROTOCOL, f"The MCP server's listing has more than {MOST_PAGES} pages.")


async def _sent(client: Client, tool: str, arguments: JsonObject) -> object:
    """Not by `call_tool`, which holds results to the server's schemas: their patterns may take for ever."""
    params = mcp_types.CallToolRequestParams(name=tool, arguments=arguments)
    return await client.session.send_request(mcp_types.CallToolRequest(params=params), _RESULT)


def _failed(error: Exception, seen: Seen, secrets: list[str]) -> McpFailed:
    """What an exception of the libraries means, in the words of ours."""
    causes = _flat(error)
    known = next((cause for cause in causes if isinstance(cause, McpFailed)), None)
    refused = next((cause for cause in (*causes, seen.error) if isinstance(cause, Refused)), None)
    told = next((cause for cause in causes if isinstance(cause, MCPError)), None)
    if known is not None:
        return known
    if refused is not None:
        return McpFailed(Fault.REFUSED, f"The MCP server's address may not be dialled: {refused}.")
    if seen.too_large:
        return McpFailed(Fault.TOO_LARGE, "The MCP server's reply is too large.")
    if seen.encoded:
        return McpFailed(Fault.PROTOCOL, "The MCP server's reply is compressed, which was not asked for.")
    status = seen.odd_status
    if status is not None and 300 <= status < 400:
        return McpFailed(Fault.HTTP, f"The MCP server answers with a redirect ({status}); none is followed.")
    if status is not None and (told is None or status in (401, 403, 404, 429) or status >= 500):
        return McpFailed(Fault.HTTP, f"The MCP server answers with HTTP status {status}.")
    if told is not None and told.error.code != mcp_types.PARSE_ERROR:
        words = without(reason(told.error.message), secrets)
        return McpFailed(Fault.PROTOCOL, f"The MCP server answers with an error ({told.error.code}): {words}")
    if any(isinstance(cause, NotResolved) for cause in causes):
        return McpFailed(Fault.UNREACHABLE, "The MCP server's name has no address.")
    if told is not None or any(isinstance(cause, ValidationError | ValueError) for cause in causes):
        return McpFailed(Fault.PROTOCOL, "The MCP server's answer is not what the protocol says.")
    if not (seen.error or any(isinstance(cause, httpx2.HTTPError | OSError) for cause in causes)):
        log.error("an MCP server could not be asked: %s", type(error).__name__)
        return McpFailed(Fault.PROTOCOL, "The MCP server could not be asked.")
    gone = "broke off" if seen.statuses else "cannot be reached"
    return McpFailed(Fault.UNREACHABLE, f"The MCP server {gone}.")


def _flat(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [one for part in error.exceptions for one in _flat(part)]
    return [error]
