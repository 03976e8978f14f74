"""Many streams at once: what a token costs the API process, and how late it is at the client."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

from agentserve.heap import freeze
from agentserve.models.source import resolve
from agentserve.text import load

SAID = " the of and to in is that it was for"  # words of one token each
MARK = b'"delta":{"content":"'
EDGE = 0.1  # of the tokens at both ends, which CPU time leaves out: requests begin and end there


@dataclass(frozen=True, slots=True)
class StreamSizes:
    streams: int = 64
    tokens: int = 200  # of each stream
    tick: float = 0.025  # seconds between its tokens


@dataclass(frozen=True, slots=True)
class StreamFindings:
    cpu: float  # seconds of the API process per token
    delays: np.ndarray  # seconds from the worker's token to the client's byte, all tokens


class _Meter:
    """CPU time of another process between two shares of all tokens."""

    def __init__(self, pid: int, tokens: int) -> None:
        self._pid = pid
        self._marks = [int(tokens * EDGE), int(tokens * (1 - EDGE))]
        self._seen = 0
        self.readings: list[tuple[int, float]] = []

    def tokens(self, count: int) -> None:
        self._seen += count
        if self._marks and self._seen >= self._marks[0]:
            self._marks.pop(0)
            self.readings.append((self._seen, cpu_seconds(self._pid)))

    @property
    def per_token(self) -> float:
        (first, before), (last, after) = self.readings
        return (after - before) / (last - first)


def cpu_seconds(pid: int) -> float:
    """User and system time so far, of all threads (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_streams(model: str, sizes: StreamSizes) -> StreamFindings:
    """Start the server with a paced worker, read all streams here, and stop it."""
    tokenizer = load(resolve(model).path, None).tokenizer
    ids = tokenizer.encode(SAID)
    with tempfile.TemporaryDirectory(prefix="agentserve-bench-") as folder:
        path = Path(folder) / "times"
        times = np.memmap(path, np.float64, "w+", shape=(sizes.streams, sizes.tokens))
        arguments = (str(path), str(sizes.streams), str(sizes.tokens), str(sizes.tick), *map(str, ids))
        server = subprocess.Popen(
            [sys.executable, "-m", "agentserve.bench.frontend.server", model, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            if not url:
                raise OSError("the server did not start; what it said above tells why")
            meter = _Meter(server.pid, sizes.streams * sizes.tokens)
            freeze()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                arrivals = runner.run(_read_all(url, model, sizes, meter))
        finally:
            server.terminate()
            server.communicate()
        return StreamFindings(meter.per_token, np.array(arrivals) - times)


async def _read_all(url: str, model: str, sizes: StreamSizes, meter: _Meter) -> list[list[float]]:
    where = urlsplit(url)
    host, port = where.hostname, where.port
    assert host is not None
    assert port is not None
    loop = asyncio.get_running_loop()
    readers: list[_Reader] = []
    for stream in range(sizes.streams):
        transport, reader = await loop.create_connection(lambda: _Reader(meter), host, port)
        transport.write(_request(model, stream, sizes.tokens))
        readers.append(reader)
    await asyncio.gather(*(reader.ended for reader in readers))
    return [reader.arrivals(sizes.tokens) for reader in readers]


def _request(model: str, stream: int, tokens: int) -> bytes:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"You are stream {stream}."}],
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": stream,
    }
    content = msgspec.json.encode(body)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class _Reader(asyncio.Protocol):
    """Writes down what came of one stream, and when; it is looked at afterwards, so that reading a
    token takes no time that the next ones wait for."""

    def __init__(self, meter: _Meter) -> None:
        self._meter = meter
        self._came: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._came.append((time.monotonic(), data))
        self._meter.tokens(data.count(MARK))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def arrivals(self, tokens: int) -> list[float]:
        """When each of the stream's tokens was whole. OSError if they are not `tokens`."""
        found: list[float] = []
        rest = b""
        for now, data in self._came:
            *events, rest = (rest + data).split(b"\n\n")
            found += [now for event in events if MARK in event]
        if len(found) != tokens:
            raise OSError(f"a stream had {len(found)} tokens instead of {tokens}")
        return found
