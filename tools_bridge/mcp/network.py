"""HTTP for the `mcp` package: connections to addresses that were judged, to one host, of bounded size.

The rules are those of webhooks (`webhooks/dial.py`), for the HTTP library that this package uses.
"""

# ruff: noqa: ASYNC109 (httpcore2 says how its backends are called)

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from ipaddress import ip_address
from typing import Any

import httpcore2
import httpx2

from tools_bridge.webhooks.address import Address, Refused
from tools_bridge.webhooks.dial import TooLarge

MOST_REQUESTS = 100  # of one operation: a server may end a stream and ask for it to be taken up again


class TooMany(Exception):
    pass


class Seen:
    """What an operation met on the network. `left`: bytes that may still be read, of all replies together."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.requests = 0
        self.statuses: list[int] = []  # of the replies
        self.encoded = False  # a reply was compressed, although that was not asked for
        self.error: Exception | None = None  # the last that a connection failed with

    @property
    def too_large(self) -> bool:
        return self.left <= 0

    @property
    def odd_status(self) -> int | None:
        """Of the last reply, where it is no answer."""
        last = self.statuses[-1] if self.statuses else 200
        return None if 200 <= last < 300 else last


class PinnedBackend(httpcore2.AsyncNetworkBackend):
    def __init__(self, host: str, port: int, addresses: Sequence[Address], seen: Seen) -> None:
        self._inner = httpcore2.AnyIOBackend()
        self._place = (host, port)
        self._addresses = addresses
        self._seen = seen

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        if (host, port) != self._place:
            raise Refused("a connection to another host was asked for")
        share = None if timeout is None else timeout / len(self._addresses)
        failure: Exception | None = None
        for address in self._addresses:
            try:
                stream = await self._inner.connect_tcp(str(address), port, timeout=share)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
                continue
            place = stream.get_extra_info("server_addr")
            if place is not None and ip_address(str(place[0])) != address:
                await stream.aclose()
                raise Refused("the connection went to another address")
            return BoundedStream(stream, self._seen)
        assert failure is not None
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.AsyncNetworkStream:
        raise Refused("no sockets of this machine")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class BoundedStream(httpcore2.AsyncNetworkStream):
    def __init__(self, inner: httpcore2.AsyncNetworkStream, seen: Seen) -> None:
        self._inner = inner
        self._seen = seen

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._seen.left <= 0:
            raise TooLarge
        data = await self._inner.read(min(max_bytes, self._seen.left), timeout)
        self._seen.left -= len(data)
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
    ) -> httpcore2.AsyncNetworkStream:
        return BoundedStream(await self._inner.start_tls(ssl_context, server_hostname, timeout), self._seen)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class Wire(httpx2.AsyncBaseTransport):
    """Requests over one backend, without proxies; nothing is unpacked."""

    def __init__(self, backend: PinnedBackend, trust: ssl.SSLContext | None, seen: Seen) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=trust, max_connections=8, retries=0, network_backend=backend
        )
        self._seen = seen

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        self._seen.requests += 1
        if self._seen.requests > MOST_REQUESTS:
            self._seen.error = TooMany()
            raise TooMany
        url = httpcore2.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        asked = httpcore2.Request(
            request.method,
            url,
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            reply = await self._pool.handle_async_request(asked)
        except Exception as error:
            self._seen.error = error
            raise
        if request.method == "POST":
            self._seen.statuses.append(reply.status)
        headers = httpx2.Headers(reply.headers)
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            self._seen.encoded = True
            await reply.aclose()
            raise httpx2.DecodingError("a reply is compressed")
        assert not isinstance(reply.stream, bytes)
        return httpx2.Response(reply.status, headers=reply.headers, stream=_Pieces(reply, self._seen))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Pieces(httpx2.AsyncByteStream):
    def __init__(self, reply: httpcore2.Response, seen: Seen) -> None:
        self._reply = reply
        self._seen = seen

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._reply.aiter_stream():
                yield piece
        except Exception as error:
            self._seen.error = error
            raise

    async def aclose(self) -> None:
        await self._reply.aclose()
