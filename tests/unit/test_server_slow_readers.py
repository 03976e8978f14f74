"""Clients that do not read what they asked for: what lies there for them is bounded, and so is how long."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.server import ServerState

from agentserve.server.http import send_queue
from agentserve.server.http.connections import Connections, WireBounds
from agentserve.server.http.sse import EventStream
from agentserve.server.http.wire_bounds import TAKEN, BoundedProtocol, bounded_protocol
from tests.api_rig import CHAT, Rig, settled, user
from tests.fakes import ScriptedEngine, say

SOON = 0.05
LONG = 60.0  # never in a test
FRAME = b"data: " + b"x" * 30_000 + b"\n\n"
WHOLE = b"y" * (12 << 20)  # more than the sockets of both sides hold


class App:
    def __init__(self) -> None:
        self.made = self.closed = 0

    async def stream(self, request: Request) -> Response:
        async def frames() -> AsyncIterator[bytes]:
            while True:
                self.made += 1
                yield FRAME

        async def close() -> None:
            self.closed += 1

        return EventStream(frames(), keep_alive=LONG, close=close)  # type: ignore[arg-type]

    async def quiet(self, request: Request) -> Response:
        """A stream of one frame, and then of nothing."""

        async def frames() -> AsyncIterator[bytes]:
            yield FRAME
            await asyncio.Event().wait()

        async def close() -> None:
            self.closed += 1

        return EventStream(frames(), keep_alive=SOON, close=close)  # type: ignore[arg-type]

    async def whole(self, request: Request) -> Response:
        return Response(WHOLE)


@asynccontextmanager
async def client(
    app: App, path: str, unread: float, **more: int
) -> AsyncIterator[tuple[socket.socket, Connections]]:
    """A connection that has asked and read nothing yet."""
    bounds = WireBounds(head_seconds=LONG, linger_seconds=LONG, unread_seconds=unread, **more)
    connections = Connections(bounds)
    routes = [
        Route("/stream", app.stream),
        Route("/whole", app.whole),
        Route("/quiet", app.quiet),
    ]
    running = uvicorn.Server(
        uvicorn.Config(
            Starlette(routes=routes),
            host="127.0.0.1",
            port=0,
            log_level="error",
            http=bounded_protocol(bounds, connections),
            ws="none",
            timeout_keep_alive=1,
        )
    )
    task = asyncio.create_task(running.serve())
    try:
        await settled(lambda: running.started)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, running.servers[0].sockets[0].getsockname())
            await loop.sock_sendall(sock, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            yield sock, connections
    finally:
        running.should_exit = True
        await task


async def test_a_stream_that_nobody_reads_waits_and_then_ends() -> None:
    app = App()
    async with client(app, "/stream", unread=4 * SOON) as (_, connections):
        await settled(lambda: app.closed == 1)
        assert app.made * len(FRAME) < 32 << 20  # what the system holds, and little more
        await settled(lambda: not len(connections))
        assert connections.unread == 1


async def test_replies_that_nobody_reads_are_bounded_together() -> None:
    """Whole replies lie here whatever their size, each until its time is over: of too many those go that have
    lain longest."""
    most = 3 * len(WHOLE)
    async with client(App(), "/whole", unread=LONG, unread_bytes=most) as (first, connections):
        place, others, loop = first.getpeername(), [], asyncio.get_running_loop()
        for number in range(2, 8):
            sock = socket.socket()
            others.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, place)
            await loop.sock_sendall(sock, b"GET /whole HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await settled(lambda number=number: connections.unread + len(connections) == number)
        await settled(lambda: connections.unread)
        assert 0 < connections.unread_bytes <= most
        kept = len(connections)
        assert kept == 7 - connections.unread >= 3
        await settled(lambda: first.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _ended(first))
        for sock in others:
            sock.close()
        await settled(lambda: not len(connections))
        assert not connections.unread_bytes


def _ended(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return True
    return False


async def test_a_whole_reply_that_nobody_reads_does_not_stay() -> None:
    async with client(App(), "/whole", unread=SOON) as (sock, connections):
        await settled(lambda: len(connections) == 1)
        await settled(lambda: not len(connections))
        assert connections.unread == 1
        # Neither in the system, which would keep megabytes of it for a client that never reads.
        await settled(lambda: sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET)


@pytest.mark.parametrize("path", ["/quiet", "/stream"])
async def test_a_client_that_has_sent_more_than_one_request_and_leaves_is_gone_for_all(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, loop = App(), asyncio.get_running_loop()
    async with client(app, path, unread=LONG) as (sock, connections):
        await loop.sock_recv(sock, 1000)
        await loop.sock_sendall(sock, b"GET /whole HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2)
        await asyncio.sleep(SOON)
        sock.close()
        await settled(lambda: app.closed == 1)
        await settled(lambda: not len(connections))
    assert not caplog.records


class Timers:
    """A loop's timers, which run when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.TimerHandle] = []
        self.loop = asyncio.get_running_loop()

    def call_later(self, seconds: float, call: Callable[..., None], *given: object) -> asyncio.TimerHandle:
        self.waiting.append(self.loop.call_later(LONG, call, *given))
        return self.waiting[-1]

    def create_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine)

    def pass_(self) -> None:
        """The time of all that wait."""
        waiting, self.waiting = self.waiting, []
        for timer in waiting:
            if not timer.cancelled():
                timer._run()  # type: ignore[attr-defined]
                timer.cancel()


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.unsent = 0
        self.closing = self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


async def connected() -> tuple[BoundedProtocol, Transport, Timers, Connections]:
    bounds = WireBounds()
    connections = Connections(bounds)
    config = uvicorn.Config(App().whole, http=bounded_protocol(bounds, connections), log_config=None)
    config.load()
    protocol = bounded_protocol(bounds, connections)(config, ServerState(), {})  # type: ignore[call-arg]
    assert isinstance(protocol, BoundedProtocol)
    transport, timers = Transport(), Timers()
    protocol.loop = timers  # type: ignore[assignment]
    protocol.connection_made(transport)
    timers.waiting.clear()
    return protocol, transport, timers, connections


async def test_who_reads_however_slowly_is_not_cut_off() -> None:
    protocol, transport, timers, connections = await connected()
    transport.unsent = 10 * TAKEN
    protocol.pause_writing()
    for _ in range(9):
        transport.unsent -= TAKEN
        timers.pass_()
        assert not transport.aborted
    transport.unsent -= TAKEN - 1
    timers.pass_()
    assert transport.aborted
    assert connections.unread == 1


async def test_who_reads_what_the_system_holds_is_not_cut_off() -> None:
    """Long before the system takes more of what lies here: what counts is what the client took."""
    bounds = WireBounds()
    connections = Connections(bounds)
    config = uvicorn.Config(
        Starlette(routes=[Route("/whole", App().whole)]),
        http=bounded_protocol(bounds, connections),
        log_config=None,
    )
    config.load()
    protocol = bounded_protocol(bounds, connections)(config, ServerState(), {})  # type: ignore[call-arg]
    assert isinstance(protocol, BoundedProtocol)
    loop, timers = asyncio.get_running_loop(), Timers()
    server = await loop.create_server(lambda: protocol, "127.0.0.1", 0)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, server.sockets[0].getsockname())
        await settled(lambda: len(connections) == 1)
        protocol.loop = timers  # type: ignore[assignment]
        await loop.sock_sendall(sock, b"GET /whole HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await settled(lambda: bool(timers.waiting) and protocol._unsent > len(WHOLE) // 2)
        for _ in range(20):
            before, taken = protocol._untaken(), 0
            while taken < 4 * TAKEN:
                taken += len(await loop.sock_recv(sock, 4096))
            await settled(lambda before=before: before - protocol._untaken() >= TAKEN)  # type: ignore[misc]
            timers.pass_()
            assert (len(connections), connections.unread) == (1, 0)
        for _ in range(2):  # what was still under way when it stopped reading counts, too
            await asyncio.sleep(SOON)
            timers.pass_()
        await settled(lambda: not len(connections))
        assert connections.unread == 1
    server.close()


async def test_where_the_system_does_not_say_what_it_holds_it_holds_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as at, socket.create_connection(at.getsockname()) as one:
        usual = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert send_queue.unsent(one) == 0
        send_queue.bound_unseen(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == usual
        monkeypatch.delattr(send_queue.termios, "TIOCOUTQ")
        assert send_queue.unsent(one) is None
        send_queue.bound_unseen(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * send_queue.ROOM
    assert send_queue.unsent(None) is None
    assert send_queue.unsent(one) is None  # closed


async def test_who_has_read_may_wait_for_what_comes_next() -> None:
    protocol, transport, timers, connections = await connected()
    transport.unsent = 10 * TAKEN
    protocol.pause_writing()
    transport.unsent = 0
    protocol.resume_writing()
    timers.pass_()
    assert not transport.aborted
    assert connections.unread == 0


async def test_the_rest_of_a_connection_that_was_closed_does_not_stay() -> None:
    """Closing waits for what is unsent, be it little."""
    protocol, transport, timers, connections = await connected()
    transport.unsent = 5
    protocol.timeout_keep_alive_handler()
    assert transport.closing
    assert not transport.aborted
    timers.pass_()
    assert transport.aborted
    protocol.connection_lost(None)
    assert (len(connections), connections.unread) == (0, 1)


async def test_a_turn_ends_whose_reader_is_too_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentserve.server.sessions.turns.MOST_UNREAD", 40)
    rig = Rig(ScriptedEngine(say("x" * 500)))
    reads, sent = asyncio.Event(), []
    body = {"model": "tiny", "stream": True, "messages": [user("a")], "max_tokens": 500}
    request = {"type": "http.request", "body": json.dumps(body).encode()}
    messages = [request]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) > 2:
            await reads.wait()

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "client": ("::1", 1),
    }  # fmt: skip
    asked = asyncio.create_task(rig.app(scope, receive, send))
    await settled(lambda: bool(rig.engine.aborted))
    assert not rig.engine.live
    reads.set()
    await asked
    told = [frame for frame in b"".join(sent).split(b"\n\n") if frame]
    assert json.loads(told[-1].removeprefix(b"data: "))["error"]["code"] == "turn_cancelled"
    assert len(told) < 60
    rig.check_rest()
