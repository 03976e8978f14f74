"""Where all room is taken, a tenant pushes out its own things, and no other's."""

from __future__ import annotations

from typing import Any

import pytest

from agentserve.server.http.idempotency import KeptBounds, KeptReply, Replies
from agentserve.server.http.responses.conversations import Conversation, Conversations
from agentserve.server.http.responses.shelf import Kept, Shelf
from agentserve.server.sessions.room import DirectoryFull
from agentserve.server.sessions.transcript import Transcript, Transcripts
from agentserve.types import SessionId
from tests.directory_rig import Harness


def kept(tenant: str, number: int, size: int = 10, **more: Any) -> Kept:
    return Kept(f"{tenant}{number}", float(number), b"x" * size, b"{}", tenant=tenant, **more)


def test_responses() -> None:
    for size, bounds in ((10, (6, 1 << 20)), (10_000, (1000, 60_000))):
        shelf = Shelf(lambda: 0.0, max_count=bounds[0], max_bytes=bounds[1], ttl=1e9)
        shelf.put(kept("b", 0, size))
        shelf.put(kept("c", 0, size))
        for number in range(1, 20):
            shelf.put(kept("a", number, size))
        assert shelf.get("b0")
        assert shelf.get("c0")
        assert shelf.get("a19")
        assert not shelf.get("a1")
        assert len(shelf) <= 6


def test_a_chain_that_cannot_go_takes_nothing_from_others() -> None:
    shelf = Shelf(lambda: 0.0, max_count=6, max_bytes=1 << 20, ttl=1e9)
    shelf.put(kept("b", 0))
    shelf.put(kept("a", 1))
    for number in range(2, 12):
        shelf.put(kept("a", number, parent=f"a{number - 1}"))
    assert shelf.get("b0")
    assert shelf.chain("a11") is not None
    shelf.put(kept("a", 12))
    assert shelf.get("b0")
    assert len(shelf) <= 6


def test_conversations() -> None:
    all_ = Conversations(max_count=4, max_bytes=1 << 20)
    all_.open(Conversation("b0", 0.0, tenant="b"))
    for number in range(9):
        all_.open(Conversation(f"a{number}", 1.0, tenant="a"))
    assert all_.get("b0")
    assert all_.get("a8")
    assert len(all_) == 4
    large = [{"id": f"i{number}", "type": "message", "text": "x" * 100_000} for number in range(12)]
    found = all_.get("a8")
    assert found is not None
    all_.add(found, large)
    assert all_.get("b0")
    assert all_.size_bytes == sum(one.cost for one in map(all_.get, ("b0", "a8")) if one is not None)


def test_answers_to_be_repeated() -> None:
    for size, bounds in ((1, KeptBounds(answers=4)), (1000, KeptBounds(bytes=4000))):
        replies = Replies(bounds)
        replies.keep(("/v1/x", "k", "b", None), KeptReply(b"", 200, (), b"b" * size, 0.0))
        for number in range(50):
            reply = KeptReply(b"", 200, (), b"a" * size, 0.0)
            replies.keep(("/v1/x", f"{number}", "a", None), reply)
        assert replies.get(("/v1/x", "k", "b", None), 1.0)
        assert replies.get(("/v1/x", "49", "a", None), 1.0)
        assert len(replies) == 4
        assert not replies.get(("/v1/x", "k", "b", None), 601.0)
        assert not replies._held.count


def test_sessions() -> None:
    one = Harness(max_sessions=6)
    first = one.turn("hello", "b", tenant="b").session
    for number in range(20):
        one.turn(f"{number}", "a", tenant="a")
    assert one.directory.get("b", first.public_id) is first
    assert (one.directory.count("a"), one.directory.count("b")) == (5, 1)
    for number in range(20):
        one.turn(f"{number}", "b", tenant="b")
    assert (one.directory.count("a"), one.directory.count("b")) == (3, 3)
    one.check()


def test_bytes_of_sessions() -> None:
    one = Harness(max_bytes=60_000)
    one.turn("hello", "b", tenant="b")
    for number in range(40):
        one.commit(one.begin(f"{number}", tenant="a"), f"{number}", "a", ids="x" * 2000)
    assert one.directory.count("b") == 1
    assert one.directory.size_bytes <= 60_000
    one.check()


def test_a_tenant_whose_sessions_all_run_takes_nobodys_place() -> None:
    one = Harness(max_sessions=4)
    first = one.turn("hello", "b", tenant="b").session
    for number in range(3):
        one.begin(f"{number}", tenant="a")
    with pytest.raises(DirectoryFull):
        one.begin("more", tenant="a")
    assert one.directory.get("b", first.public_id) is first
    one.begin("more", tenant="b")  # its own goes
    assert one.directory.count("b") == 1
    one.check()


def test_transcripts() -> None:
    transcripts = Transcripts(max_bytes=10_000)
    transcripts.owner_of = lambda key: key[0]
    gone: list[str] = []
    transcripts.on_drop = gone.append
    for name in ("b0", *(f"a{number}" for number in range(20))):
        transcripts.restore(Transcript(SessionId(name), b"x" * 1500, b"", ((1, 1),)))
    assert transcripts.get(SessionId("b0"))
    assert transcripts.get(SessionId("a19"))
    assert transcripts.size_bytes <= 10_000
    assert gone[:2] == ["a0", "a1"]
    for name in [*transcripts._kept]:
        transcripts.forget(name)
    assert not transcripts.size_bytes
    assert not transcripts._owners
