"""Connections to the addresses that were judged, and to nothing else.

A name is resolved once; the backend given to httpcore knows the addresses that were found good, dials
them, and resolves nothing. TLS still checks the name. httpcore itself follows no redirects and knows no
proxies. What comes back is cut at a number of bytes, as it is read.
"""

# ruff: noqa: ASYNC109 (httpcore says how its backends are called)

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Protocol

import httpcore

from tools_bridge.webhooks.address import Address, AddressPolicy, Refused, Target, checked

_MOST_ASKED = 256  # threads: a name server that is slow holds those who ask it, for as long as it likes


class NotResolved(Exception):
    pass


class TooLarge(Exception):
    pass


class Resolver(Protocol):
    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """All addresses of a name, as numbers. NotResolved."""
        ...


class SystemResolver:
    """As the machine resolves names. Who asks for what is being asked waits for that, so that a name holds
    one thread; threads do not hold up the end of the process."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], asyncio.Future[list[str]]] = {}

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        asked = self._asked.get((host, port))
        if asked is None:
            if len(self._asked) >= _MOST_ASKED:
                raise NotResolved("too many names are being resolved")
            asked = self._ask(host, port)
        try:
            return await asyncio.shield(asked)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise NotResolved(reason or type(error).__name__) from error

    def _ask(self, host: str, port: int) -> asyncio.Future[list[str]]:
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[list[str]] = loop.create_future()

        def ended(found: list[str] | Exception) -> None:
            del self._asked[host, port]
            if isinstance(found, Exception):
                asked.set_exception(found)
                asked.exception()  # whoever asked may be gone
            else:
                asked.set_result(found)

        def work() -> None:
            try:
                found: list[str] | Exception = _look_up(host, port)
            except Exception as error:
                found = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended, found)

        self._asked[host, port] = asked
        threading.Thread(target=work, name="resolve", daemon=True).start()
        return asked


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(place[0]) for *_, place in found]


async def addresses_of(target: Target, policy: AddressPolicy, resolver: Resolver) -> tuple[Address, ...]:
    """What is to be dialled for a URL that was parsed, found once and judged. Whoever dials an address that
    somebody named dials these, and asks for no other. Refused, NotResolved."""
    answers = [str(target.address)]
    if target.address is None:
        answers = list(await resolver.resolve(target.host, target.port))
    return checked(target.host, answers, policy)


class Allowance:
    """Bytes that may still be read of a reply. Before its head is whole, only so many."""

    def __init__(self, head: int, body: int) -> None:
        self._left = head
        self._body = body

    @property
    def left(self) -> int:
        return self._left

    def head_is_whole(self) -> None:
        # Of a body in pieces, each piece says how long it is: with one byte each that is six times as much.
        self._left = self._left + 8 * self._body + 1024

    def take(self, count: int) -> None:
        self._left -= count


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """For one attempt to one host."""

    def __init__(
        self,
        inner: httpcore.AsyncNetworkBackend,
        host: str,
        port: int,
        addresses: Sequence[Address],
        allowance: Allowance,
    ) -> None:
        self._inner = inner
        self._place = (host, port)
        self._addresses = addresses
        self._allowance = allowance

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        if (host, port) != self._place:
            raise Refused("a connection to another host was asked for")
        share = None if timeout is None else timeout / len(self._addresses)
        failure: Exception | None = None
        for address in self._addresses:
            try:
                stream = await self._inner.connect_tcp(str(address), port, timeout=share)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
                continue
            if not _is_at(stream, address):
                await stream.aclose()
                raise Refused("the connection went to another address")
            return BoundedStream(stream, self._allowance)
        assert failure is not None
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise Refused("no sockets of this machine")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


def _is_at(stream: httpcore.AsyncNetworkStream, address: Address) -> bool:
    place = stream.get_extra_info("server_addr")
    return place is None or ip_address(str(place[0])) == address


class BoundedStream(httpcore.AsyncNetworkStream):
    """Reads no more than it may."""

    def __init__(self, inner: httpcore.AsyncNetworkStream, allowance: Allowance) -> None:
        self._inner = inner
        self._allowance = allowance

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._allowance.left <= 0:
            raise TooLarge
        data = await self._inner.read(min(max_bytes, self._allowance.left), timeout)
        self._allowance.take(len(data))
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
    ) -> httpcore.AsyncNetworkStream:
        inner = await self._inner.start_tls(ssl_context, server_hostname, timeout)
        return BoundedStream(inner, self._allowance)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
