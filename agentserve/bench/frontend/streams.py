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

    def token(self) -> None:
        self._seen += 1
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
            arrivals = asyncio.run(_read_all(url, model, sizes, meter))
        finally:
            server.terminate()
            server.communicate()
        return StreamFindings(meter.per_token, np.array(arrivals) - times)


async def _read_all(url: str, model: str, sizes: StreamSizes, meter: _Meter) -> list[list[float]]:
    return await asyncio.gather(
        *(
            _read(url, _request(model, stream, sizes.tokens), sizes.tokens, meter)
            for stream in range(sizes.streams)
        )
    )


def _request(model: str, stream: int, tokens: int) -> bytes:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"You are stream {stream}."}],
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": stream,
    }
    return msgspec.json.encode(body)


async def _read(url: str, body: bytes, tokens: int, meter: _Meter) -> list[float]:
    """When each of a stream's tokens came."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    arrivals: list[float] = []
    rest = b""
    while data := await reader.read(1 << 16):
        now = time.monotonic()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if MARK in event:
                arrivals.append(now)
                meter.token()
    writer.close()
    if len(arrivals) != tokens:
        raise OSError(f"a stream had {len(arrivals)} tokens instead of {tokens}")
    return arrivals
