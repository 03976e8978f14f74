"""Sessions as bytes: what is damaged or contradicts itself makes none; ids of other models are left out."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from agentserve.server.sessions.session_record import CommittedTurn, PendingCall, Session
from agentserve.server.sessions.stored import StoredHead, head_bytes, read_session, turn_bytes
from agentserve.types import SessionId, SessionState, TurnId

MINE = b"tokenizer and template"


def same(at: float) -> float:
    return at


def a_turn(number: int, calls: tuple[str, ...] = (), **changed: Any) -> CommittedTurn:
    facts: dict[str, Any] = {
        "turn": TurnId(number),
        "at": 10.0 * number,
        "start": 2 * number - 2,
        "keys": (b"u%d" % number, b"a%d" % number),
        "replies": {2 * number - 1: array("i", [number, 1 << 30])},
        "length": 100 * number,
        "calls": tuple(PendingCall(id_, "tool \ud800", '{"a": 1}', TurnId(number)) for id_ in calls),
        "handed": dict.fromkeys(calls, True),
        "usage": {"prompt_tokens": 5},
        "tails": {2 * number - 1: "<|assistant|>"},
    }
    return CommittedTurn(**(facts | changed))


def a_session(*turns: CommittedTurn) -> Session:
    session = Session(SessionId("s1"), "mine", "t", SessionId("s0"), "parent", created=1.0, active=2.0)
    for turn in turns:
        session.last_turn = turn.turn
        session.add(turn)
        session.rest(turn.turn, turn.at, "\ud83d cut")
    return session


def written(session: Session, *turns: CommittedTurn, text: bytes = MINE) -> tuple[bytes, dict[int, bytes]]:
    return head_bytes(session, None, same), {turn.turn: turn_bytes(turn, text, same) for turn in turns}


def test_a_session_comes_back_with_texts_that_are_no_utf8() -> None:
    turns = [a_turn(1), a_turn(2, ("c1",))]
    session = a_session(*turns)
    head, records = written(session, *turns)
    found, since = read_session("s1", head, records, MINE, same, to_come=same)
    for name in Session.__slots__:
        if name not in ("history", "active"):
            assert getattr(found, name) == getattr(session, name), name
    assert list(found.history) == list(session.history)
    assert (since, found.state) == (None, SessionState.WAITING_TOOL)


def test_ids_of_another_tokenizer_or_template_are_rendered_again() -> None:
    turns = [a_turn(1), a_turn(2)]
    session = a_session(*turns)
    head, records = written(session, *turns)
    records[2] = turn_bytes(turns[1], b"another model", same)
    found, _ = read_session("s1", head, records, MINE, same, to_come=same)
    assert found.replies == {1: array("i", [1, 1 << 30])}
    assert found.tails == {1: "<|assistant|>"}
    assert found.points == {b"a1": 100, b"a2": 0}  # how many tokens these are now, nobody knows
    assert (found.length, found.committed, found.chain) == (0, 2, session.chain)
    back, _ = read_session("s1", head, records, b"another model", same, to_come=same)
    assert back.replies == {3: array("i", [2, 1 << 30])}  # a model that comes back finds its own


def test_a_turn_of_an_earlier_version_does_not_say_what_its_prompt_ended_with() -> None:
    turn = a_turn(1)
    session = a_session(turn)
    record = msgspec.msgpack.decode(turn_bytes(turn, MINE, same))
    del record["tails"]
    records = {1: msgspec.msgpack.encode(record)}
    found, _ = read_session("s1", head_bytes(session, None, same), records, MINE, same, to_come=same)
    assert (found.replies, found.tails) == (session.replies, {})


def test_a_turn_that_was_cut_off_still_runs() -> None:
    session = a_session(a_turn(1, ("c1",)))
    session.last_turn, session.running = 2, TurnId(2)
    found, since = read_session("s1", *written(session, a_turn(1, ("c1",))), MINE, same, to_come=same)
    assert (found.running, found.committed, since) == (2, 1, None)
    assert found.pending.keys() == {"c1"}


def test_a_turn_whose_record_is_there_was_committed() -> None:
    session = a_session(a_turn(1))
    session.last_turn, session.running = 2, TurnId(2)
    head, records = written(session, a_turn(1), a_turn(2, ("c1",)))
    found, since = read_session("s1", head, records, MINE, same, to_come=same)
    assert (found.running, found.committed, found.state, since) == (None, 2, SessionState.WAITING_TOOL, 20.0)
    assert found.active == 20.0


def changed(head: bytes, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(head, type=StoredHead), **fields)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"committed": 3},
        {"committed": 1},
        {"last_turn": 1},
        {"running": 1},
        {"pending": ("never made",)},
        {"state": "ASLEEP"},
        {"history": (("IDLE", 1.0, 1, b"\xff"),)},
    ],
)
def test_a_head_that_contradicts_its_turns_makes_no_session(fields: dict[str, Any]) -> None:
    turns = [a_turn(1), a_turn(2)]
    head, records = written(a_session(*turns), *turns)
    read_session("s1", changed(head), records, MINE, same, to_come=same)
    with pytest.raises(ValueError):
        read_session("s1", changed(head, **fields), records, MINE, same, to_come=same)


@pytest.mark.parametrize(
    "broken",
    [
        turn_bytes(a_turn(2, start=1), MINE, same),
        turn_bytes(a_turn(2, start=5), MINE, same),
        turn_bytes(a_turn(2, keys=()), MINE, same),
        turn_bytes(a_turn(2), MINE, same)[:-1],
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"at": "soon"}),
        turn_bytes(a_turn(2), MINE, same).replace(b"\xc4\x08", b"\xc4\x07", 1),
    ],
)
def test_a_turn_that_does_not_fit_makes_no_session(broken: bytes) -> None:
    turns = [a_turn(1), a_turn(2)]
    head, records = written(a_session(*turns), *turns)
    with pytest.raises(ValueError):
        read_session("s1", head, {**records, 2: broken}, MINE, same, to_come=same)
    with pytest.raises(ValueError):
        read_session("s1", head, {1: records[1]}, MINE, same, to_come=same)
    with pytest.raises(ValueError):
        read_session("s1", broken, records, MINE, same, to_come=same)
