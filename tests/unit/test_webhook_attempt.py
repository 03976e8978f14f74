"""What comes back from a receiver: a value, whatever it does, and never more than may be read."""

import asyncio
import gzip

import httpcore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire_rig import FOREVER, LIMITS, Names, Wire, answer, post, sender
from tools_bridge.webhooks.dial import NotResolved
from tools_bridge.webhooks.replies import Answered, Failed, Fault

# --- what comes back -----------------------------------------------------------------------


async def test_a_large_body_is_cut_while_it_comes():
    one_more = b"x" * (LIMITS.body_bytes + 1)
    for wire in (
        Wire(answer(one_more)),
        Wire(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2711\r\n" + one_more + b"\r\n0\r\n\r\n"),
        Wire(answer(b"x" * 50_000_000)),
        Wire(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 1000] * 100_000),
        Wire(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 100_000),
    ):
        reply = await sender(wire).send(post())
        assert (reply.fault, reply.status) == (Fault.TOO_LARGE, 200)
        assert wire.read < 200_000
        assert wire.closed


async def test_a_body_of_just_the_size_is_taken_also_in_single_bytes():
    body = b"x" * LIMITS.body_bytes
    pieces = [b"1\r\nx\r\n"] * len(body) + [b"0\r\n\r\n"]
    for wire in (Wire(answer(body)), Wire(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *pieces)):
        reply = await sender(wire).send(post())
        assert reply.body == body


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\n", *[b"x-%d: y\r\n" % n for n in range(100_000)]],
        [b"HTTP/1.1 200 OK\r\nx: ", *[b"y" * 1000] * 1000],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 100_000,
        [b"x" * 1000] * 1000,
        [b"\r\n" * 1000] * 1000,
    ],
)
async def test_a_head_is_bounded(pieces):
    wire = Wire(*pieces)
    reply = await sender(wire).send(post())
    assert reply.fault in (Fault.TOO_LARGE, Fault.PROTOCOL)
    assert wire.read <= LIMITS.head_bytes
    assert wire.closed


async def test_nobody_reads_what_is_not_wanted():
    for wire, wants in (
        (Wire(answer(b"x" * 10**6)), False),
        (Wire(answer(b"x" * 10**6, status=b"500 No")), True),
    ):
        reply = await sender(wire).send(post(wants_body=wants))
        assert reply.body == b""
        assert wire.read <= LIMITS.head_bytes


async def test_compressed_bodies_stay_as_they_are():
    bomb = gzip.compress(bytes(9_000_000))
    assert len(bomb) < LIMITS.body_bytes
    reply = await sender(Wire(answer(bomb, b"content-encoding: gzip\r\n"))).send(post())
    assert reply.content_encoding == "gzip"
    assert reply.body == bomb


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([], Fault.PROTOCOL),
        ([b"HTTP/1.1 200"], Fault.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nxx"], Fault.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"], Fault.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"], Fault.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], Fault.PROTOCOL),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], Fault.PROTOCOL),
        ([b"\0\xff" * 20], Fault.PROTOCOL),
        ([httpcore.ReadError("reset")], Fault.PROTOCOL),
        ([httpcore.ReadTimeout()], Fault.TIMEOUT),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nxx", httpcore.ReadTimeout()], Fault.TIMEOUT),
        ([FOREVER], Fault.TIMEOUT),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nxx", FOREVER], Fault.TIMEOUT),
        ([RuntimeError("a library's own")], Fault.INTERNAL),
    ],
)
async def test_whatever_a_receiver_does_is_a_value(pieces, fault):
    wire = Wire(*pieces)
    reply = await sender(wire).send(post(seconds=0.05 if FOREVER in pieces else 30.0))
    assert reply.fault is fault
    assert wire.closed
    assert "SSH" not in str(reply)


async def test_a_change_of_protocol_that_was_not_asked_for_is_a_failure():
    reply = await sender(Wire(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")).send(
        post()
    )
    assert reply.fault is Fault.PROTOCOL


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (Names(NotResolved("Name or service not known")), Fault.RESOLVE),
        (Names([]), Fault.REFUSED),
        (Names(FOREVER), Fault.TIMEOUT),
        (Names(OSError("odd")), Fault.CONNECT),
    ],
)
async def test_whatever_a_name_server_does_is_a_value(names, fault):
    wire = Wire(answer())
    reply = await sender(wire, names).send(post(seconds=0.05 if FOREVER in names.answers else 30.0))
    assert reply.fault is fault
    assert wire.dialled == []


async def test_nobody_there():
    wire = Wire(fails=("1.1.1.1", "8.8.8.8"))
    reply = await sender(wire, Names(["1.1.1.1", "8.8.8.8"])).send(post())
    assert reply == Failed(Fault.CONNECT)


async def test_being_cancelled_closes_the_connection():
    wire = Wire(FOREVER)
    task = asyncio.create_task(sender(wire).send(post()))
    while not wire.sent:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wire.closed


HEADS = [
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.0 200 OK\r\n",
    b"HTTP/1.1 100 x\r\n\r\n",
    b"HTTP/1.1 204\r\n",
    b"HTTP/2 200\r\n",
]
LINES = [
    *(
        b"content-length: 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"x\r\n",
    ),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b": y\r\n", b" folded\r\n"),
    *(b"content-encoding: gzip\r\n", b"connection: keep-alive\r\n", b"upgrade: h2c\r\n", b"x: \xff\0\r\n"),
    *(b"retry-after: x\r\n", b"content-type: application/json\r\n", b"\r\n", b"\n", b"\r\n\r\n"),
]
REST = [
    b"{}",
    b"hello",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"0\r\nx: y\r\n\r\n",
    b"fffffffffffffffff\r\n",
    b"5;ext=1\r\n",
]
ANYTHING = st.lists(st.sampled_from([*HEADS, *LINES, *REST]) | st.binary(max_size=20), max_size=12)


@given(st.sampled_from([*HEADS, b""]), ANYTHING)
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_an_answer_or_a_defined_failure(first, pieces):
    wire = Wire(first, *pieces)
    reply = asyncio.run(sender(wire).send(post()))
    assert isinstance(reply, Answered | Failed)
    assert getattr(reply, "fault", None) is not Fault.INTERNAL
    assert wire.closed
