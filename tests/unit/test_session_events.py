"""Logs of events, and the stream that shows one to readers who come, go and are slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from agentserve.server.http.sessions.event_stream import frames_of, place_of
from agentserve.server.sessions.events import EventLog, EventLogs
from agentserve.types import SessionId
from tests.sse import Sent, parse, sent, take_until

A, B, C = SessionId("a"), SessionId("b"), SessionId("c")


def logs(**bounds: int) -> EventLogs:
    names = count(1)
    return EventLogs(lambda: f"{next(names):x}", **bounds)


def read(log: EventLog, given: str | None = None) -> AsyncIterator[Sent]:
    return sent(frames_of(log, *place_of(log, given)))


async def rest(stream: AsyncIterator[Sent]) -> list[Sent]:
    """What is there; the log must be closed."""
    return [event async for event in stream]


async def test_every_place_of_a_log_can_be_taken_up_again() -> None:
    kept = logs()
    for i in range(20):
        kept.publish(A, "delta", {"turn": 1, "content": f"\u2028{i}\r\n\n"})
    log = kept.of(A)
    kept.forget(A)
    whole = await rest(read(log))
    assert [event.number for event in whole] == list(range(1, 21))
    assert whole[3].data == {"turn": 1, "content": "\u20283\r\n\n"}
    for i, event in enumerate(whole):
        assert await rest(read(log, event.id)) == whole[i + 1 :]


def test_data_is_one_line_of_ascii_whatever_a_model_writes() -> None:
    kept = logs()
    for content, line in (
        ("plain\n", rb'"plain\n"'),
        ("\u2028é", rb'"\u2028\u00e9"'),
        ("\ud83d", rb'"\ud83d"'),
    ):
        kept.publish(A, "delta", {"turn": 1, "content": content})
        _, event = kept.of(A).since(kept.of(A).last - 1)
        assert event is not None
        assert event.data == b'{"turn":1,"content":' + line + b"}"


async def test_old_events_make_room_and_a_reader_hears_how_many_are_gone() -> None:
    kept = logs(log_bytes=1000)
    kept.publish(A, "delta", {"turn": 1})
    first = kept.of(A)
    stream = read(first)
    assert (await anext(stream)).number == 1
    for i in range(50):
        kept.publish(A, "delta", {"turn": i})
        assert first.size_bytes <= 1000
    gap = await anext(stream)
    assert gap.kind == "gap"
    assert gap.data == {"lost": first.first - 2, "next": first.first, "turns_whole": False}
    assert (await anext(stream)).number == first.first
    kept.forget(A)
    assert [event.number for event in await rest(stream)] == list(range(first.first + 1, 52))
    anew = await rest(read(first))
    assert anew[0].data == {"lost": first.first - 1, "next": first.first, "turns_whole": False}
    assert await rest(read(first, gap.id)) == anew[1:]


@pytest.mark.parametrize("given", ["9-3", "1-99"])
async def test_an_id_of_another_log_is_a_gap_and_then_all_there_is(given: str) -> None:
    kept = logs()
    for _ in range(3):
        kept.publish(A, "state", {"turn": 1})
    log = kept.of(A)
    kept.forget(A)
    gap, *events = await rest(read(log, given))
    assert (gap.kind, gap.data) == ("gap", {"lost": None, "next": 1, "turns_whole": False})
    assert [event.number for event in events] == [1, 2, 3]


async def test_a_flood_of_hints_leaves_turns_as_they_were() -> None:
    kept = logs(log_bytes=4000)
    log, turns = kept.of(A), [1, 2, 3]
    for turn in turns:
        kept.publish(A, "turn_started", {"turn": turn})
        for each in range(500):
            kept.publish(A, ("hints", "decision", "devalued", "forked")[each % 4], {"turn": turn})
            assert log.size_bytes <= 4000
    stream = read(log)
    kept.forget(A)
    story = await rest(stream)
    assert [event.data["turn"] for event in story if event.kind == "turn_started"] == turns
    gaps = [event for event in story if event.kind == "gap"]
    assert all(gap.data["turns_whole"] for gap in gaps)
    others = [event.number for event in story if event.kind not in ("gap", "turn_started")]
    assert others == list(range(log.last - len(others) + 1, log.last + 1)), "the latest are there"
    assert sum(gap.data["lost"] for gap in gaps) + len(story) - len(gaps) == log.last
    assert log.size_bytes <= 1000 + 3 * 200
    for at, event in enumerate(story):  # wherever a reader takes it up again
        assert await rest(read(log, event.id)) == story[at + 1 :]


async def test_turns_push_out_turns_and_hints_alike() -> None:
    kept = logs(log_bytes=4000)
    log = kept.of(A)
    for turn in range(100):
        kept.publish(A, "hints", {"turn": turn})
        kept.publish(A, "delta", {"turn": turn})
        assert log.size_bytes <= 4000
    kept.forget(A)
    story = await rest(read(log))
    assert sum(event.kind == "delta" for event in story) > 15
    assert sum(event.kind == "hints" for event in story) > 4
    assert not story[0].data["turns_whole"]
    assert all(event.data["turns_whole"] for event in story[1:] if event.kind == "gap")


def test_a_session_that_is_only_talked_about_counts_as_silent() -> None:
    kept = logs(log_bytes=1000, max_bytes=2000)
    for _ in range(5):
        kept.publish(A, "delta", {"turn": 1})
        kept.publish(B, "delta", {"turn": 1})
    kept.publish(A, "hints", {"turn": 1})
    for _ in range(5):
        kept.publish(C, "delta", {"turn": 1})
    assert (kept.of(A).size_bytes, kept.of(B).size_bytes > 0) == (0, True)


async def test_a_reader_of_a_log_that_was_emptied_hears_of_it() -> None:
    kept = logs()
    for _ in range(3):
        kept.publish(A, "delta", {"turn": 1})
    log = kept.of(A)
    log.clear()
    stream = read(log)
    log.close()
    assert [event.data["lost"] for event in await rest(stream)] == [3]


async def test_of_what_an_earlier_server_told_nobody_knows() -> None:
    kept = logs()
    log = kept.of(A, goes_on=True)
    kept.publish(A, "state", {"turn": 7})
    kept.forget(A)
    story = await rest(read(log))
    assert [event.kind for event in story] == ["gap", "state"]
    assert story[0].data == {"lost": None, "next": 1, "turns_whole": False}
    assert await rest(read(log, story[0].id)) == story[1:]


async def test_now_skips_what_was() -> None:
    kept = logs()
    kept.publish(A, "state", {"turn": 1})
    log = kept.of(A)
    stream = read(log, "now")
    step = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    kept.publish(A, "state", {"turn": 2})
    assert (await step).data == {"turn": 2}


def test_all_logs_together_are_bounded_and_the_longest_silent_are_emptied() -> None:
    kept = logs(log_bytes=1000, max_bytes=2000)
    for _ in range(10):
        kept.publish(A, "x", {"turn": 1})
    for _ in range(10):
        kept.publish(B, "x", {"turn": 1})
    for _ in range(10):
        kept.publish(C, "x", {"turn": 1})
        assert kept.size_bytes <= 2000
    assert kept.of(A).size_bytes == 0
    assert kept.of(A).first == 11
    assert kept.size_bytes == sum(kept.of(key).size_bytes for key in (A, B, C))
    for key in (A, B, C):
        kept.forget(key)
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_an_event_larger_than_a_log_is_told_without_its_data() -> None:
    kept = logs(log_bytes=1000)
    kept.publish(A, "delta", {"turn": 4, "content": "x" * 5000})
    lost, event = kept.of(A).since(0)
    assert lost == 0
    assert event is not None
    assert event.data == b'{"turn":4,"too_large":5023}'
    assert b"xxx" not in event.data


async def test_many_readers_wait_and_all_wake() -> None:
    kept = logs()
    kept.publish(A, "state", {"turn": 1})
    streams = [read(kept.of(A), "now") for _ in range(5)]
    steps = [asyncio.ensure_future(take_until(stream, "end")) for stream in streams]
    await asyncio.sleep(0)
    for kind in ("state", "end"):
        kept.publish(A, kind, {"turn": 2})
        await asyncio.sleep(0)
    assert [[event.kind for event in await step] for step in steps] == [["state", "end"]] * 5


async def test_when_the_server_leaves_all_streams_end() -> None:
    kept = logs()
    kept.publish(A, "state", {"turn": 1})
    stream = read(kept.of(A))
    kept.shut()
    assert len(await rest(stream)) == 1
    assert await rest(read(kept.of(B))) == []


def test_frames_are_lines() -> None:
    event: Any = parse(b'id: a-1\nevent: state\ndata: {"turn":1}')
    assert event == Sent("a-1", "state", {"turn": 1})
