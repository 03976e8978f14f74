"""Between the transport of the `mcp` package and its client: messages pass as `shape.py` has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any

import mcp_types
from mcp.shared.message import SessionMessage

from tools_bridge.mcp.shape import Misshapen, is_large, sifted

Item = Any  # a `SessionMessage`, or an exception
MOST_ASKED = 100  # objects, lists and values of what a server asks or tells of its own accord


@asynccontextmanager
async def sieve(transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """`transport`: as a `Client` takes it."""
    async with transport as (read, write):
        yield _Sieve(read), write


class _Sieve:
    """A `ReadStream`. What a server asks or tells at length has not been said."""

    def __init__(self, read: Any) -> None:
        self._read = read

    @property
    def last_context(self) -> object:
        return getattr(self._read, "last_context", None)

    async def receive(self) -> Item:
        while True:
            item = _passed(await self._read.receive())
            if item is not None:
                return item

    async def __anext__(self) -> Item:
        while True:
            item = _passed(await self._read.__anext__())
            if item is not None:
                return item

    def __aiter__(self) -> _Sieve:
        return self

    async def aclose(self) -> None:
        await self._read.aclose()

    async def __aenter__(self) -> _Sieve:
        await self._read.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        handled: bool | None = await self._read.__aexit__(kind, error, trace)
        return handled


def _passed(item: Item) -> Item:
    """None: nobody is to see it."""
    if not isinstance(item, SessionMessage):
        return item
    message = item.message
    if isinstance(message, mcp_types.JSONRPCRequest | mcp_types.JSONRPCNotification):
        return None if is_large(message.params, MOST_ASKED) else item
    if isinstance(message, mcp_types.JSONRPCResponse):
        try:
            message.result = sifted(message.result)
        except Misshapen:
            error = mcp_types.ErrorData(code=mcp_types.PARSE_ERROR, message="")
            item.message = mcp_types.JSONRPCError(jsonrpc="2.0", id=message.id, error=error)
    return item
