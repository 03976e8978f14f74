"""A network that knows the addresses that were judged, and nothing else; what is read of it is bounded.

Written once for httpcore (webhooks) and httpcore2 (MCP), whose classes differ and whose methods do not.
"""

# ruff: noqa: ASYNC109 (httpcore says how its backends are called)

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Any, ClassVar, Protocol

from tools_bridge.webhooks.address import Address, Refused


class TooLarge(Exception):
    pass


class Budget(Protocol):
    """Bytes that may still be read."""

    @property
    def left(self) -> int: ...

    def take(self, count: int) -> None: ...


class Bounded:
    """A stream that reads no more than it may. Its class has the library's for a base, too."""

    def __init__(self, inner: Any, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._budget.left <= 0:
            raise TooLarge
        data: bytes = await self._inner.read(min(max_bytes, self._budget.left), timeout)
        self._budget.take(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        return type(self)(await self._inner.start_tls(ssl_context, server_hostname, timeout), self._budget)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class Pinned:
    """A backend for one host. Its class has the library's for a base, too."""

    stream: ClassVar[type[Bounded]]
    failures: ClassVar[tuple[type[Exception], ...]]  # after which the next address is tried

    def __init__(
        self, inner: Any, host: str, port: int, addresses: Sequence[Address], budget: Budget
    ) -> None:
        self._inner = inner
        self._place = (host, port)
        self._addresses = addresses
        self._budget = budget

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> Any:
        if (host, port) != self._place:
            raise Refused("a connection to another host was asked for")
        share = None if timeout is None else timeout / len(self._addresses)
        failure: Exception | None = None
        for address in self._addresses:
            try:
                stream = await self._inner.connect_tcp(str(address), port, timeout=share)
            except self.failures as error:
                failure = error
                continue
            place = stream.get_extra_info("server_addr")
            if place is not None and ip_address(str(place[0])) != address:
                await stream.aclose()
                raise Refused("the connection went to another address")
            return self.stream(stream, self._budget)
        assert failure is not None
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> Any:
        raise Refused("no sockets of this machine")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
