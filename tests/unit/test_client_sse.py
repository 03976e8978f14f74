"""Frames come out the same however bytes are cut."""

from __future__ import annotations

import random

import pytest

from agentserve.client.protocol import sse
from agentserve.client.protocol.sse import Frame, FrameTooLong, SseDecoder

STREAM = (
    '\ufeff: open\r\n\r\nid: a-1\nevent: one\ndata: {"é": 1}\n\n'
    "data: x\rdata:  y\r\r"
    "id\ndata\n\n"
    "id: a\0b\nretry: 5\nevent: gone\n\n: keep\n\nid: a-2\r\nevent: last\r\ndata:z\r\n\r\n"
    "event: cut\ndata: no"
).encode()
FRAMES = [
    Frame("a-1", "one", '{"é": 1}'),
    Frame("a-1", "message", "x\n y"),
    Frame("", "message", ""),
    Frame("a-2", "last", "z"),
]


def test_every_split_in_two() -> None:
    for cut in range(len(STREAM) + 1):
        decoder = SseDecoder()
        assert decoder.feed(STREAM[:cut]) + decoder.feed(STREAM[cut:]) == FRAMES, cut


def test_byte_by_byte_and_at_random() -> None:
    draw = random.Random(7)
    for longest in (1, 2, 3, 7, 30):
        decoder, found, place = SseDecoder(), [], 0
        while place < len(STREAM):
            size = draw.randint(1, longest)
            found += decoder.feed(STREAM[place : place + size])
            place += size
        assert found == FRAMES


def test_a_frame_is_told_as_soon_as_it_ends() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\n") == []
    assert decoder.feed(b"\n") == [Frame("", "message", "1")]


@pytest.mark.parametrize("endless", [b"data: xxxxxxxx\n", b"xxxxxxxxxxxx"])
def test_what_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch, endless: bytes) -> None:
    monkeypatch.setattr(sse, "MOST_BYTES", 100)
    decoder = SseDecoder()
    for _ in range(100 // len(endless)):
        decoder.feed(endless)
    with pytest.raises(FrameTooLong):
        decoder.feed(endless * 7)
