"""A strict reader of server-sent events, over a real socket or a whole body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sent:
    id: str
    kind: str
    data: Any

    @property
    def number(self) -> int:
        return int(self.id.rpartition("-")[2])


def parse(block: bytes) -> Sent | None:
    """None for comments and for `retry`."""
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
    if b"data" not in fields:
        assert set(fields) <= {b"retry"}, block
        return None
    assert set(fields) == {b"id", b"event", b"data"}, block
    return Sent(fields[b"id"].decode(), fields[b"event"].decode(), json.loads(fields[b"data"]))


async def sent(chunks: AsyncIterator[bytes]) -> AsyncIterator[Sent]:
    rest = b""
    async for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            if (event := parse(block)) is not None:
                yield event
    assert not rest


async def take_until(stream: AsyncIterator[Sent], kind: str, seconds: float = 60.0) -> list[Sent]:
    """Events up to the first of `kind`, that one included."""
    found: list[Sent] = []
    async with asyncio.timeout(seconds):
        async for event in stream:
            found.append(event)
            if event.kind == kind:
                return found
    raise AssertionError(f"the stream ended before {kind}: {found}")
