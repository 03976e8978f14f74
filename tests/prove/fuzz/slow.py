"""Clients that take their time: heads and bodies that drip, streams that nobody reads, connections that say
nothing. Each goes on until the server ends it, or until it is told that all is over."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from tests.prove.fuzz.seeds import SAY, user

LOUD = 250  # of so many clients one asks for more than the system holds for a reader
CHAT = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
JSON = "content-type: application/json\r\n"


class Slow:
    """A crowd of them. `ends` counts how each of a kind ended: closed by the server, or still there."""

    def __init__(self, port: int, pause: float) -> None:
        """pause: seconds between two bytes."""
        self._port = port
        self._pause = pause
        self.kinds: dict[str, Callable[[random.Random], Awaitable[bool]]] = {
            "nothing": self._nothing,
            "head": self._head,
            "body": self._body,
            "chunks": self._chunks,
            "upload": self._upload,
            "stream": self._stream,
            "events": self._events,
            "reply": self._reply,
            "half": self._half,
            "loud": self._loud,
        }
        self.ends: Counter[str] = Counter()
        self.session = "s1"

    async def crowd(self, count: int, seed: int, seconds: float) -> None:
        """All of them at once, for at most so long."""
        rng = random.Random(seed)
        loud = count // LOUD
        names = [name for name in self.kinds if name != "loud"]
        kinds = [names[i % len(names)] for i in range(count - loud)] + ["loud"] * loud
        await asyncio.gather(*(self._one(name, rng.getrandbits(32), seconds) for name in kinds))

    async def _one(self, name: str, seed: int, seconds: float) -> None:
        rng = random.Random(seed)
        ended = False
        with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(seconds):
                await asyncio.sleep(rng.random() * min(2.0, seconds / 4))
                try:
                    ended = await self.kinds[name](rng)
                except ConnectionError:
                    ended = True
        self.ends[f"{name}: {'ended' if ended else 'left'}"] += 1

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        return await asyncio.open_connection(sock=sock, limit=1 << 12)

    async def _drip(self, first: bytes, rest: bytes) -> bool:
        """Say `first`, then `rest` for ever, byte by byte."""
        reader, writer = await self._open()
        try:
            writer.write(first)
            read = asyncio.create_task(reader.read())
            at = 0
            while not read.done():
                writer.write(rest[at % len(rest) : at % len(rest) + 1])
                at += 1
                await asyncio.wait((read,), timeout=self._pause)
            read.exception()
            return True
        finally:
            writer.transport.abort()

    # --- kinds ------------------------------------------------------------------------------

    async def _nothing(self, rng: random.Random) -> bool:
        return await self._ended(b"")

    async def _half(self, rng: random.Random) -> bool:
        return await self._ended(CHAT.encode() + b"content-le")

    async def _ended(self, said: bytes) -> bool:
        reader, writer = await self._open()
        try:
            writer.write(said)
            while await reader.read(4096):
                pass
            return True
        finally:
            writer.transport.abort()

    async def _head(self, rng: random.Random) -> bool:
        return await self._drip(b"GET /ping HTTP/1.1\r\n", b"a: b\r\n")

    async def _body(self, rng: random.Random) -> bool:
        path = rng.choice(("/v1/responses", "/v1/messages", "/tokenize", "/v1/agents/sessions"))
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 100000\r\n\r\n{{"
        return await self._drip(head.encode(), b'"a":1,')

    async def _chunks(self, rng: random.Random) -> bool:
        return await self._drip(f"{CHAT}{JSON}transfer-encoding: chunked\r\n\r\n".encode(), b"1\r\n \r\n")

    async def _upload(self, rng: random.Random) -> bool:
        """The output of a tool, which may come slowly: of a call that there is not, though."""
        path = f"/agentserve/sessions/{self.session}/tool_results/call_x/stream"
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        return await self._drip(head.encode(), b"1\r\nx\r\n")

    async def _stream(self, rng: random.Random) -> bool:
        """Ask for a stream, and read a byte now and then. It is small: the system holds it, and the server
        has nothing left of it."""
        words = "word " * 60 + str(rng.random())
        return await self._sip(_streamed(f"{SAY}{words}", max_tokens=200))

    async def _loud(self, rng: random.Random) -> bool:
        """The same with more than the system holds."""
        return await self._sip(_streamed(str(rng.random()), max_tokens=250, n=16, ignore_eos=True))

    async def _events(self, rng: random.Random) -> bool:
        path = f"/agentserve/sessions/{self.session}/events"
        return await self._sip(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())

    async def _reply(self, rng: random.Random) -> bool:
        """A large reply, of which a byte is read now and then."""
        return await self._sip(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 40)

    async def _sip(self, said: bytes) -> bool:
        """Straight from the socket: what this process had read ahead, it would read from to the end. And a
        reset is heard of at once, before what the system has for the reader."""
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", self._port))
            await loop.sock_sendall(sock, said)
            while await loop.sock_recv(sock, 1):
                await asyncio.sleep(self._pause)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return True
            return True


def _streamed(text: str, **more: Any) -> bytes:
    asked = {"model": "tiny", "stream": True, "messages": [user(text)], "logprobs": True, "top_logprobs": 20}
    data = json.dumps(asked | more).encode()
    return f"{CHAT}{JSON}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
