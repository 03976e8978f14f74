"""What a connection may do before a request is one: uvicorn's protocol on httptools, with bounds.

The parser has none: a header without end, or a thousand connections that say nothing, would cost memory
until there is none. Bytes that bring neither a whole head nor a body are bounded, whatever they are
(headers, trailers, chunk extensions), and so is the time in which a head must come.

What is sent is bounded, too: a reply waits while its client leaves more than a little of it unread, and a
client that goes on so, or reads the end of a reply never, is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from contextlib import suppress
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from agentserve.server.errors import ApiError
from agentserve.server.http.connections import Connections, WireBounds, counted_as
from agentserve.server.http.names import REQUEST_HEADER
from agentserve.server.http.send_queue import bound_unseen, unsent
from agentserve.server.json_line import dump_json

TAKEN = 16 << 10  # bytes: who reads so much in a while reads
_NO_LINGER = struct.pack("ii", 1, 0)  # on, for no seconds: closing sends a reset


def bounded_protocol(bounds: WireBounds, connections: Connections | None = None) -> type[HttpToolsProtocol]:
    """The protocol of one server: for uvicorn's `http` setting."""
    shared = Connections(bounds) if connections is None else connections

    class Bounded(BoundedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(bounds, shared, *args, **kwargs)

    return Bounded


class _Quiet(logging.Logger):
    """Errors pass; of what strangers send no warnings are written, or they could fill a disk with them."""

    def __init__(self, into: logging.Logger) -> None:
        super().__init__(into.name, into.level)
        self.parent, self.manager = into, into.manager

    def isEnabledFor(self, level: int) -> bool:
        return level != logging.WARNING and super().isEnabledFor(level)


class BoundedProtocol(HttpToolsProtocol):
    def __init__(self, bounds: WireBounds, shared: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _Quiet(self.logger)
        self._bounds = bounds
        self._shared = shared
        self.address = ""
        self._admitted = False
        self._idle_bytes = 0  # since there was last a whole head, a piece of a body or a whole request
        self._whole = True  # the last request has come to its end
        self._verdict: ApiError | None = None  # why the parser was stopped
        self._over = False  # all is said; what still comes is not looked at
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._reader: asyncio.TimerHandle | None = None  # until when something of it has to be read
        self._unsent = 0  # bytes, when that began

    # --- the connection ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        self.address = counted_as(str(peer[0])) if isinstance(peer, tuple) and peer else ""
        self._admitted = self._shared.admit(self.address)
        if not self._admitted:
            self.transport = transport
            self._say(_too_many())
            transport.close()
            return
        bound_unseen(transport.get_extra_info("socket"))
        super().connection_made(transport)
        self._arm(self._bounds.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._was_read()
        self._shared.lie(self, 0)
        if self._admitted:
            self._admitted = False
            self._shared.left(self.address)
            super().connection_lost(exc)
            self._tell_all()
            self._let_go()

    def data_received(self, data: bytes) -> None:
        if not self._admitted or self._over or self.transport.is_closing():
            return
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._over or self.transport.is_closing():
            return
        if self._idle_bytes > self._bounds.head_bytes:
            self._verdict = _head_too_large(self._bounds)
            self.send_400_response("")
        elif self._idle_bytes and self._whole and self._timer is None:
            self._arm(self._bounds.head_seconds)  # of the next request there is a part

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _tell_all(self) -> None:
        """That the client is gone: the base class tells the request that came last, and where others were
        sent behind it, it is not the one that runs."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _let_go(self) -> None:
        """Of requests that were sent behind others and will not be answered: each knows this connection, and
        this one knows them."""
        for cycle, _ in self.pipeline:
            cycle.on_response = _nothing
        self.pipeline.clear()

    # --- who does not read ---------------------------------------------------------------

    def pause_writing(self) -> None:
        """More lies there than the transport wants to hold."""
        super().pause_writing()
        self._must_be_read()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._was_read()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._closes()

    def shutdown(self) -> None:
        super().shutdown()
        self._closes()

    def _closes(self) -> None:
        """Closing waits for what is unsent, for ever."""
        if self.transport.is_closing():
            self._must_be_read()

    def _must_be_read(self) -> None:
        if self._reader is None and self._admitted:
            self._unsent = self._untaken()
            self._reader = self.loop.call_later(self._bounds.unread_seconds, self._look)
            self._shared.lie(self, self.transport.get_write_buffer_size())
            for one in self._shared.too_many():
                self.loop.call_soon(one.cut_off)

    def _was_read(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
            self._shared.lie(self, 0)

    def _look(self) -> None:
        """Has it read meanwhile? Nothing is written while much is unsent, so that only shrinks."""
        self._reader = None
        if self._unsent - self._untaken() >= TAKEN:
            self._must_be_read()
        else:
            self.cut_off()

    def cut_off(self) -> None:
        self._shared.unread += 1
        self._reset()

    def _untaken(self) -> int:
        """Bytes that the client has not taken, here and in the system."""
        return self.transport.get_write_buffer_size() + (unsent(self.transport.get_extra_info("socket")) or 0)

    def _reset(self) -> None:
        """Abort, and have the system forget what it holds, up to some megabytes: it would keep that for a
        client that never reads, and one that reads slowly would not learn for hours that it was cut off."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):  # the client is gone already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    # --- the parser's ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._arm(self._bounds.head_seconds)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._bounds.url_bytes:
            self._stop(_url_too_long(self._bounds))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self._bounds.headers:
            self._stop(_too_many_headers(self._bounds))

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) > self._bounds.head_bytes:
            self._stop(_head_too_large(self._bounds))
        self._disarm()
        self._idle_bytes = 0
        self._whole = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        self._whole = True
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before it was whole
            self._disarm()
            self._arm(self._bounds.head_seconds)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._closes()
        answered = self.cycle.response_complete  # the last request that came; others may be before it
        if answered and not self._whole and not self.transport.is_closing():
            self._disarm()
            self._arm(self._bounds.linger_seconds)

    def send_400_response(self, msg: str) -> None:
        """What is no request, or too much of one. Where an answer has begun nothing more can be said."""
        verdict = self._verdict or ApiError("Invalid HTTP request received.", code="invalid_http")
        if self.cycle is not None and not self.cycle.response_complete:
            self._close()
        else:
            self._say(verdict)

    # --- inside ------------------------------------------------------------------------

    def _stop(self, verdict: ApiError) -> None:
        self._verdict = verdict
        raise httptools.HttpParserError(verdict.message)  # it comes back as `send_400_response`

    def _close(self) -> None:
        self.transport.close()
        self._closes()

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._over:
            self._close()
        elif self._whole and self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # an answer is still being given: it closes then
        elif self._whole and self._idle_bytes:
            self._say(_head_too_slow(self._bounds))
        else:
            self._close()

    def _say(self, error: ApiError) -> None:
        """A whole reply, and the end of the connection, but not at once: a client that is still sending would
        be told of a reset, and never read it."""
        body = dump_json(error.body())
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            REQUEST_HEADER: f"req-{secrets.token_hex(12)}",
            "connection": "close",
            **error.reply_headers,
        }
        head = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self._over = True
        self._disarm()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm(self._bounds.linger_seconds)


def _nothing() -> None:
    """What there is to do for a request that is not answered any more."""


def _too_many() -> ApiError:
    return ApiError(
        "There are too many connections.",
        status=503,
        code="too_many_connections",
        headers={"retry-after": "1", "x-should-retry": "true"},
    )


def _head_too_large(bounds: WireBounds) -> ApiError:
    return ApiError(
        f"The request's headers are larger than {bounds.head_bytes} bytes.",
        status=431,
        code="headers_too_large",
    )


def _too_many_headers(bounds: WireBounds) -> ApiError:
    return ApiError(
        f"The request has more than {bounds.headers} headers.", status=431, code="too_many_headers"
    )


def _url_too_long(bounds: WireBounds) -> ApiError:
    return ApiError(f"The URL is longer than {bounds.url_bytes} bytes.", status=414, code="url_too_long")


def _head_too_slow(bounds: WireBounds) -> ApiError:
    return ApiError(
        f"The request's headers were not whole within {bounds.head_seconds:g} s.",
        status=408,
        code="request_timeout",
    )
