"""Where all room is taken, a tenant pushes out its own things, and no other's."""

from __future__ import annotations

from typing import Any

from agentserve.server.http.idempotency import KeptBounds, KeptReply, Replies
from agentserve.server.http.responses.conversations import Conversation, Conversations
from agentserve.server.http.responses.shelf import Kept, Shelf


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
