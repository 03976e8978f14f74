"""The link between the API process and a worker: framed msgpack over a Unix socket.

A frame is a 4-byte big-endian length and one message of `agentserve.messages` in msgpack.
Decoding is typed: bytes that are no such message are a LinkError, and whoever reads them
drops the peer. Nothing here ever evaluates what it receives (never pickle).

Two ends with different needs. The worker's must never block the engine's step: it reads what
is there, writes what fits, and keeps the rest in an outbox; past `OUTBOX_LIMIT` it reports
`congested`, and the worker stops planning until the API process has read. The API process's
end is asyncio.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from agentserve.messages import Command, Event, StepDone

HEADER = struct.Struct(">I")
MAX_FRAME = 64 * 2**20  # bytes; a history of a million tokens is 4 MB, a large grammar some MB
OUTBOX_LIMIT = 8 * 2**20  # bytes
AT_ONCE = 32  # events of steps that are handed out in one turn of the API process's event loop
_READ = 256 * 1024

_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M")


class LinkError(Exception):
    """The peer sent bytes that are no message, or a message too large. The link is unusable."""


def encode_frame(message: Command | Event) -> bytes:
    """One message as a frame. LinkError if it is larger than MAX_FRAME."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise LinkError(f"a message of {len(body)} bytes is larger than the {MAX_FRAME} a frame may have")
    return HEADER.pack(len(body)) + body


class FrameDecoder(Generic[M]):
    """Turns bytes, however they were cut, into messages. The last bytes may be half a frame."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], max_frame: int = MAX_FRAME) -> None:
        self._decoder = decoder
        self._max = max_frame
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[M]:
        """The messages that `data` completes; take them all. Raises LinkError at the first bad frame,
        after the good ones before it; the decoder is then spent."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            if length > self._max:
                raise LinkError(f"a frame of {length} bytes is larger than the allowed {self._max}")
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[start + HEADER.size : end])
            try:
                message = self._decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise LinkError(f"a frame of {length} bytes is no known message: {error}") from None
            yield message
            start = end
        del self._buffer[:start]


class WorkerLink:
    """The worker's end. One thread uses it; no call blocks except `wait`."""

    def __init__(self, sock: socket.socket, outbox_limit: int = OUTBOX_LIMIT) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = FrameDecoder(msgspec.msgpack.Decoder(Command))
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._limit = outbox_limit
        self.closed = False

    @classmethod
    def connect(cls, path: Path) -> WorkerLink:
        """Connect to the API process listening at `path`. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    @property
    def congested(self) -> bool:
        """The API process lags by more than the outbox may hold: do not produce more."""
        return self._outbox_bytes > self._limit

    @property
    def unsent(self) -> int:
        return self._outbox_bytes

    def send(self, event: Event) -> None:
        """Queue one event and write what the socket takes now."""
        frame = encode_frame(event)
        self._outbox.append(memoryview(frame))
        self._outbox_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now; a broken pipe closes the link."""
        while self._outbox and not self.closed:
            head = self._outbox[0]
            try:
                sent = self._socket.send(head)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            self._outbox_bytes -= sent
            if sent == len(head):
                self._outbox.popleft()
            else:
                self._outbox[0] = head[sent:]

    def receive(self) -> list[Command]:
        """Commands that have arrived. At the end of the stream the link is closed.

        Raises LinkError on a bad frame.
        """
        commands: list[Command] = []
        while not self.closed:
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            commands += self._decoder.feed(data)
            if len(data) < _READ:
                break
        return commands

    def wait(self, timeout: float | None = None, also: Sequence[int] = ()) -> None:
        """Sleep until there is something to read, room for the outbox, or time is up; or until one of
        the file descriptors `also` can be read."""
        if self.closed:
            return
        readable = [self._socket.fileno(), *also]
        writable = [self._socket.fileno()] if self._outbox else []
        select.select(readable, writable, [], timeout)
        if self._outbox:
            self.flush()

    def wait_writable(self, timeout: float) -> None:
        """Sleep until the outbox can go on, then write what fits."""
        select.select([], [self._socket.fileno()], [], timeout)
        self.flush()

    def close(self) -> None:
        self.closed = True
        self._socket.close()


class ApiLink:
    """The API process's end of one worker's link, on the running event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, command: Command) -> None:
        """Queue one command; never blocks. Lost without a word if the worker is gone: its death
        is what `events` ending says."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(command))

    async def events(self) -> AsyncIterator[Event]:
        """Events in order, until the worker is gone. Raises LinkError on a bad frame.

        After `AT_ONCE` of what steps brought about everybody else has a turn of the loop, also within a
        step (which then comes in parts): what has gathered while the loop was not run, or while many
        turns end, keeps no other client waiting, and is read as fast as it can be dealt with."""
        decoder = FrameDecoder(msgspec.msgpack.Decoder(Event))
        left = AT_ONCE
        while True:
            try:
                data = await self._reader.read(_READ)
            except OSError:
                return
            if not data:
                return
            for event in decoder.feed(data):
                for part in _parts(event):
                    size = _size(part)
                    if size > left:
                        left = AT_ONCE
                        await asyncio.sleep(0)
                    left -= size
                    yield part

    def close(self) -> None:
        self._writer.close()


def _parts(event: Event) -> Iterator[Event]:
    """A large step as several, of at most AT_ONCE events; the first has the worker's view."""
    if not isinstance(event, StepDone) or len(event.events) <= AT_ONCE:
        yield event
        return
    for start in range(0, len(event.events), AT_ONCE):
        yield StepDone(event.events[start : start + AT_ONCE], None if start else event.worker)


def _size(event: Event) -> int:
    return max(1, len(event.events)) if isinstance(event, StepDone) else 1


def peer_pid(sock: socket.socket) -> int | None:
    """The process at the other end of a Unix socket; None where the system does not say (not Linux)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
