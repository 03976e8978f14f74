"""Frames survive every cut, bad bytes drop the peer, and a slow reader never blocks the worker's end."""

from __future__ import annotations

import asyncio
import socket
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.messages import (
    Abort,
    Command,
    DefineGrammar,
    Event,
    Fork,
    Shutdown,
    StepDone,
    Submit,
    Token,
    WorkerView,
    pack_tokens,
)
from agentserve.server.workers.link import (
    AT_ONCE,
    HEADER,
    ApiLink,
    FrameDecoder,
    LinkError,
    WorkerLink,
    encode_frame,
)
from agentserve.types import Sampling, SessionId, TurnId

S, T = SessionId("s"), TurnId(1)

COMMANDS: list[Command] = [
    Submit(S, T, pack_tokens(array("i", range(5000))), Sampling(logit_bias={3: -1.5}, stop=("a", "ü"))),
    Abort(S, T),
    Fork(S, SessionId("child"), 7),
    DefineGrammar("g", "x" * 70_000),
    Shutdown(),
]


def decoder(limit: int = 2**20) -> FrameDecoder[Command]:
    return FrameDecoder(msgspec.msgpack.Decoder(Command), limit)


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, 4000), min_size=1, max_size=60))
def test_frames_come_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    data = b"".join(encode_frame(command) for command in COMMANDS)
    frames, got, start = decoder(), [], 0
    while start < len(data):
        cut = cuts[len(got) % len(cuts)]
        got += frames.feed(data[start : start + cut])
        start += cut
    assert got == COMMANDS
    assert frames.pending == 0


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(0),
        HEADER.pack(3) + b"\xc1\xc1\xc1",
        HEADER.pack(5) + b"GET /",
        b"\x80\x04\x95" + b"\0" * 40,  # the beginning of a pickle: read as a length far too large
        HEADER.pack(2**32 - 1),
        HEADER.pack(20) + msgspec.msgpack.encode({"type": "no such command"})[:20].ljust(20, b"\0"),
        HEADER.pack(1) + b"\xc0",
        HEADER.pack(4000) + b"\x91" * 4000,  # nested without end
    ],
)
def test_bytes_that_are_no_command_are_a_link_error(data: bytes) -> None:
    with pytest.raises(LinkError):
        list(decoder().feed(data))


def test_what_came_before_a_bad_frame_is_not_lost() -> None:
    messages = decoder().feed(encode_frame(COMMANDS[1]) + HEADER.pack(3) + b"bad")
    assert next(messages) == COMMANDS[1]
    with pytest.raises(LinkError):
        next(messages)


def test_an_event_is_no_command() -> None:
    with pytest.raises(LinkError):
        list(decoder().feed(encode_frame(StepDone([Token(S, T, 0, 1)]))))


def test_a_large_frame_is_refused_before_its_body_arrives() -> None:
    with pytest.raises(LinkError, match="larger than"):
        list(decoder(limit=100).feed(HEADER.pack(101)))


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_slow_reader_congests_the_worker_but_never_blocks_it(pair) -> None:
    ours, theirs = pair
    link = WorkerLink(ours, outbox_limit=100_000)
    event = StepDone([Token(S, T, index, index) for index in range(500)])
    sent = 0
    while not link.congested:
        link.send(event)
        sent += 1
        assert sent < 10_000
    frames = FrameDecoder(msgspec.msgpack.Decoder(Event))
    received: list[Event] = []
    theirs.setblocking(False)
    while len(received) < sent:
        try:
            received += frames.feed(theirs.recv(65536))
        except BlockingIOError:
            link.wait(5.0)
    assert received == [event] * sent
    assert not link.congested
    assert link.unsent == 0


def test_the_end_of_the_stream_closes_the_link_after_what_was_sent(pair) -> None:
    ours, theirs = pair
    theirs.sendall(encode_frame(Abort(S, T)))
    theirs.close()
    link = WorkerLink(ours)
    assert link.receive() == [Abort(S, T)]
    link.wait(5.0)
    assert link.receive() == []
    assert link.closed
    link.send(StepDone([]))  # into a broken pipe: no exception, no growth that matters


def test_a_broken_pipe_closes_the_link(pair) -> None:
    ours, theirs = pair
    link = WorkerLink(ours)
    theirs.close()
    link.send(StepDone([]))
    assert link.closed


async def test_the_asyncio_end_reads_events_until_the_peer_is_gone(pair) -> None:
    ours, theirs = pair
    worker = WorkerLink(theirs)
    link = ApiLink(*await asyncio.open_unix_connection(sock=ours))
    link.send(COMMANDS[0])
    worker.wait(5.0)
    await asyncio.sleep(0)
    got: list[Command] = []
    while not got:
        worker.wait(5.0)
        got = worker.receive()
    assert got == [COMMANDS[0]]
    worker.send(StepDone([Token(S, T, 0, 1)]))
    worker.close()
    assert [event async for event in link.events()] == [StepDone([Token(S, T, 0, 1)])]
    link.send(Shutdown())  # to a peer that is gone: no exception
    link.close()


async def test_a_backlog_is_handed_out_in_small_parts_between_which_the_loop_runs(pair) -> None:
    ours, theirs = pair
    link = ApiLink(*await asyncio.open_unix_connection(sock=ours))
    worker = WorkerLink(theirs)
    tokens = [Token(S, T, index, 1) for index in range(1000)]
    view = WorkerView(0, 0, 0, 8, 8, 0, 0)
    for start in range(0, 1000, 100):
        worker.send(StepDone(tokens[start : start + 100], view))
    assert not worker.unsent  # all of it waits in the socket
    worker.close()
    got: list[StepDone] = []
    most = 0

    async def read() -> None:
        async for event in link.events():
            assert isinstance(event, StepDone)
            got.append(event)

    reading = asyncio.create_task(read())
    while not reading.done():
        before = len(got)
        await asyncio.sleep(0)  # one turn of the loop
        most = max(most, sum(len(step.events) for step in got[before:]))
    await reading
    assert [token for step in got for token in step.events] == tokens
    assert sum(step.worker is not None for step in got) == 10
    assert 0 < most <= AT_ONCE
    link.close()


async def test_the_asyncio_end_raises_on_a_bad_frame(pair) -> None:
    ours, theirs = pair
    link = ApiLink(*await asyncio.open_unix_connection(sock=ours))
    theirs.sendall(HEADER.pack(3) + b"bad")
    with pytest.raises(LinkError):
        async for _ in link.events():
            pass
    link.close()


def test_nothing_in_the_wire_path_can_run_what_it_receives() -> None:
    from pathlib import Path

    import agentserve

    root = Path(agentserve.__file__).parent
    for file in [root / "messages.py", *(root / "server").glob("*.py"), *(root / "core").glob("*.py")]:
        source = file.read_text()
        for word in ("import pickle", "from pickle", "import marshal", "import shelve", "eval(", "exec("):
            assert word not in source.replace("create_subprocess_exec(", ""), f"{word} in {file.name}"
