"""HTTP for the `mcp` package: connections to addresses that were judged, to one host, of bounded size.

The rules are those of webhooks (`webhooks/pinned.py`), for the HTTP library that this package uses.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence

import httpcore2
import httpx2

from tools_bridge.mcp.structure import Structure
from tools_bridge.webhooks.address import Address
from tools_bridge.webhooks.pinned import Bounded, Pinned, TooLarge

MOST_REQUESTS = 100  # of one operation: a server may end a stream and ask for it to be taken up again


class TooMany(Exception):
    pass


class Seen:
    """What an operation met on the network. `left`: bytes that may still be read, of all replies together;
    `parts`: what there may be in them (`structure.py`)."""

    def __init__(self, most: int, parts: int) -> None:
        self.left = most
        self.parts = parts
        self.requests = 0
        self.statuses: list[int] = []  # of the replies
        self.encoded = False  # a reply was compressed, although that was not asked for
        self.error: Exception | None = None  # the last that a connection failed with

    def take(self, count: int) -> None:
        self.left -= count

    @property
    def too_large(self) -> bool:
        return self.left <= 0 or self.parts < 0

    @property
    def odd_status(self) -> int | None:
        """Of the last reply, where it is no answer."""
        last = self.statuses[-1] if self.statuses else 200
        return None if 200 <= last < 300 else last


class BoundedStream(Bounded, httpcore2.AsyncNetworkStream):
    pass


class PinnedBackend(Pinned, httpcore2.AsyncNetworkBackend):
    """For one operation."""

    stream = BoundedStream
    failures = (httpcore2.ConnectError, httpcore2.ConnectTimeout)

    def __init__(self, host: str, port: int, addresses: Sequence[Address], seen: Seen) -> None:
        super().__init__(httpcore2.AnyIOBackend(), host, port, addresses, seen)


class Wire(httpx2.AsyncBaseTransport):
    """Requests over one backend, without proxies; nothing is unpacked."""

    def __init__(self, backend: PinnedBackend, trust: ssl.SSLContext | None, seen: Seen) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=trust, max_connections=4, retries=0, network_backend=backend
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
        return httpx2.Response(reply.status, headers=_plain(reply.headers), stream=_Pieces(reply, self._seen))

    async def aclose(self) -> None:
        await self._pool.aclose()


def _plain(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without parameters of the content's type. Text would be read by the charset that is named there, which
    may be any codec of Python's: some unpack, some take quadratic time. JSON and events are UTF-8."""
    return [
        (name, value.partition(b";")[0] if name.lower() == b"content-type" else value)
        for name, value in headers
    ]


class _Pieces(httpx2.AsyncByteStream):
    def __init__(self, reply: httpcore2.Response, seen: Seen) -> None:
        self._reply = reply
        self._seen = seen

    async def __aiter__(self) -> AsyncIterator[bytes]:
        structure = Structure()
        try:
            async for piece in self._reply.aiter_stream():
                self._seen.parts -= structure.cost(piece)
                if self._seen.parts < 0:
                    raise TooLarge
                yield piece
        except Exception as error:
            self._seen.error = error
            raise

    async def aclose(self) -> None:
        await self._reply.aclose()
