"""Transcripts: what is kept of sessions' words, within bounds, and as values a journal can write."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from agentserve.server.sessions.session_record import Lease, Session
from agentserve.server.sessions.transcript import (
    Held,
    Told,
    Transcripts,
    read_messages,
    read_transcript,
    result_digest,
)
from agentserve.text.errors import TextError
from agentserve.types import SessionId, TurnId


def lease(name: str, turn: int, messages: int, epoch: int = 0) -> Lease:
    session = Session(SessionId(name), name, "t", SessionId(name), None, 0.0, 0.0, epoch=epoch)
    return Lease(session, TurnId(turn), tuple(bytes([i]) for i in range(messages)), {})


def told(*messages: dict[str, Any], **results: str) -> Told:
    digests = {call: result_digest(content) for call, content in results.items()}
    return Told(msgspec.json.encode(list(messages)), b"{}", digests)


REPLY = {"role": "assistant", "content": 'a\u2028"]'}


def test_a_transcript_is_the_request_and_the_reply() -> None:
    kept = Transcripts()
    kept.committed(lease("s", 1, 1), told({"role": "user", "content": "u]"}), REPLY)
    kept.committed(lease("s", 3, 3), told({"role": "user"}, REPLY, {"role": "user"}), REPLY)
    found = kept.get(SessionId("s"))
    assert found is not None
    assert json.loads(found.messages) == [{"role": "user"}, REPLY, {"role": "user"}, REPLY]
    assert found.marks == ((1, 2), (3, 4))
    assert (found.at(3), found.at(2)) == (4, None)
    assert kept.size_bytes == found.cost


def test_half_a_surrogate_pair_from_the_model_loses_nothing() -> None:
    kept, odd = Transcripts(), {"role": "assistant", "content": "\ud800"}
    kept.committed(lease("s", 1, 1), told({"role": "user"}), odd)
    found = kept.get(SessionId("s"))
    assert found is not None
    assert read_messages(found.messages) == [{"role": "user"}, odd]
    kept.fork(found, SessionId("c"), read_messages(found.messages))
    assert read_messages(kept.get(SessionId("c")).messages) == [{"role": "user"}, odd]  # type: ignore[union-attr]


def test_what_was_held_is_answered_with_the_turn() -> None:
    kept, key = Transcripts(), SessionId("s")
    kept.committed(lease("s", 1, 1), told({}), REPLY)
    rain = Held(b'"rain"', result_digest("rain"), 0)
    kept.take(key, {"one": rain, "two": Held(b'"-"', b"", 0)})
    kept.committed(lease("s", 2, 4, epoch=2), told({}, {}, {}, {}, one="rain", two="made up"), REPLY)
    found = kept.get(key)
    assert found is not None
    assert found.held == {}
    assert (found.answers["one"].digest, found.answers["one"].epoch) == (rain.digest, 0)
    assert found.answers["two"].digest == b""  # no result equals what nobody sent
    assert found.answers["one"].turn == 2


def test_a_rollback_keeps_what_came_and_drops_what_was_made_up() -> None:
    kept, key = Transcripts(), SessionId("s")
    kept.rolled_back(key)
    kept.committed(lease("s", 1, 1), told({}), REPLY)
    came, made_up = Held(b'"x"', b"d", 0), Held(b'"y"', b"", 0)
    kept.take(key, {"one": came, "two": made_up})
    kept.rolled_back(key)
    found = kept.get(key)
    assert found is not None
    assert found.held == {"one": came}
    kept.take(key, {"three": came})
    kept.put_back(found)
    assert kept.get(key) == found
    kept.committed(lease("s", 2, 3), told({}, {}, {}), REPLY)
    kept.put_back(found)  # of an older turn
    assert kept.get(key).held == {}  # type: ignore[union-attr]
    assert kept.size_bytes == kept.get(key).cost  # type: ignore[union-attr]


def test_the_longest_unused_go_first_and_the_books_agree() -> None:
    kept = Transcripts(max_bytes=10_000)
    for i in range(20):
        kept.committed(lease(f"s{i}", 1, 1), told({"role": "user", "content": "x" * 500}), REPLY)
        assert kept.size_bytes <= 10_000
        assert kept.get(SessionId(f"s{i}")) is not None
    assert kept.get(SessionId("s0")) is None
    assert len(kept) == 6
    kept.committed(lease("big", 1, 1), told({"role": "user", "content": "x" * 20_000}), REPLY)
    assert kept.get(SessionId("big")) is None
    assert len(kept) == 6  # one that can never fit puts nobody out
    for i in range(20):
        kept.forget(SessionId(f"s{i}"))
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_a_transcript_that_outgrows_everything_is_dropped() -> None:
    kept, key = Transcripts(max_bytes=3000), SessionId("s")
    kept.committed(lease("s", 1, 1), told({}), REPLY)
    kept.take(key, {"one": Held(b"x" * 4000, b"d", 0)})
    assert (kept.get(key), kept.size_bytes) == (None, 0)


def test_a_journal_can_write_it_and_read_it_back() -> None:
    kept, key = Transcripts(), SessionId("s")
    kept.committed(lease("s", 1, 1), told({}), REPLY)
    kept.committed(lease("s", 2, 3), told({}, {}, {}, one="rain"), REPLY)
    kept.take(key, {"two": Held(b'"x"', b"\xff\x00", 1)})
    value = kept.export(key)
    again = read_transcript(value, key, 4)
    assert again == kept.get(key)
    other = Transcripts()
    other.restore(again)
    assert other.export(key) == value
    assert Transcripts().export(key) == b""
    for data, name, messages in ((value, "s", 2), (value, "other", 4), (value[:-1], "s", 4), (b"", "s", 4)):
        assert read_transcript(data, SessionId(name), messages) is None
    assert other.size_bytes == kept.size_bytes


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("x", [{"type": "text", "text": "x"}], True),
        ("", [], True),
        ("x", "y", False),
        ("xy", [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}], False),
    ],
)
def test_digests_are_of_what_is_said(left: object, right: object, same: bool) -> None:
    assert (result_digest(left) == result_digest(right)) is same


@pytest.mark.parametrize("content", [None, 7, {}, [7], [{"type": "hologram"}], [{"type": "text"}]])
def test_what_is_no_content_has_no_digest(content: object) -> None:
    with pytest.raises(TextError):
        result_digest(content)


def test_who_there_is_no_room_for_is_told_of() -> None:
    kept, gone = Transcripts(max_bytes=10_000), []
    kept.on_drop = gone.append
    for i in range(20):
        kept.committed(lease(f"s{i}", 1, 1), told({"role": "user", "content": "x" * 500}), REPLY)
    assert gone == [f"s{i}" for i in range(20 - len(kept))]
    kept.committed(lease("s19", 2, 3), told({"role": "user", "content": "x" * 20_000}), REPLY)
    assert gone[-1] == "s19"
