"""A proxy on a real socket that cuts connections in the middle of what the server says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class CuttingProxy:
    """`cuts`: of each stream of events, after how many bytes of the reply it is reset; then no more."""

    def __init__(self, upstream: str, cuts: list[int]) -> None:
        at = urlsplit(upstream)
        assert at.hostname
        assert at.port
        self._at = (at.hostname, at.port)
        self.cuts = cuts
        self.streams = 0  # that were opened through it
        self.places: list[bytes | None] = []  # that they asked for

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        left: int | None = None
        if head.startswith(b"GET") and b"/events " in head.split(b"\r\n")[0]:
            self.streams += 1
            lines = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            self.places.append(lines.get(b"last-event-id"))
            left = self.cuts.pop(0) if self.cuts else None
        there, back = await asyncio.open_connection(*self._at)
        back.write(head.replace(b"onnection: keep-alive", b"onnection: close"))  # a request for each
        sending = asyncio.create_task(_copy(reader, back))
        try:
            while left != 0 and (data := await there.read(65536 if left is None else min(left, 65536))):
                writer.write(data)
                await writer.drain()
                left = None if left is None else left - len(data)
        except ConnectionError:
            pass
        finally:
            sending.cancel()
            writer.transport.abort()
            back.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def cutting(upstream: str, cuts: list[int]) -> AsyncIterator[tuple[str, CuttingProxy]]:
    proxy = CuttingProxy(upstream, cuts)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_quiet(proxy._serve(reader, writer)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", proxy
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _quiet(serving: object) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await serving  # type: ignore[misc]
