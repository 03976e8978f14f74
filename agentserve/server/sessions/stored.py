"""Sessions as bytes, and back: one *head* per session and one record per committed turn.

A head has what changes (numbers, state, what is pending), a turn what it added for good; so a turn
costs its own size, however long the session is. A turn is written while its session runs it, in one
transaction with the head that says so: a head that runs a turn whose record is there is of a session
that committed it, and one whose record is missing is of a session whose turn was cut off.

Moments are Unix time here, for monotonic clocks do not outlive their machine. Ids are worth something
only to the tokenizer and template that gave them: each turn says whose they are, and under others
its replies are rendered from their text again.

Texts that models and engines write are kept as UTF-8 with surrogates, which JSON escapes may name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from agentserve.messages import pack_tokens, unpack_tokens
from agentserve.server.sessions.session_record import CommittedTurn, Folded, PendingCall, Session, Transition
from agentserve.types import SessionId, SessionState, TurnId
from tiering.hints import OneWait, Said
from tiering.policy.base import Span

Moment = Callable[[float], float]
"""From one clock to another, in seconds."""


class StoredWait(msgspec.Struct, frozen=True, omit_defaults=True):
    """`OneWait`."""

    expected: float | None = None
    since: float | None = None
    deadline: float | None = None
    final: bool = False


class StoredSaid(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Said`."""

    wait: StoredWait = StoredWait()
    ahead: StoredWait = StoredWait()
    priority: int = 0
    retain: float | tuple[Span, ...] | None = None
    lent: bool = False  # absent in what earlier versions wrote


class StoredHead(msgspec.Struct, frozen=True, omit_defaults=True):
    public_id: str
    tenant: str
    family: str
    created: float
    active: float
    used: int
    committed: int  # turns before the one that runs
    last_turn: int
    state: str
    parent: str | None = None
    epoch: int = 0
    running: int | None = None
    since: float | None = None  # it waits for tools
    pending: tuple[str, ...] = ()  # of the last turn's calls, those that still have no result
    history: tuple[tuple[str, float, int, bytes, tuple[bytes, ...]], ...] = ()
    said: StoredSaid = StoredSaid()  # absent in what earlier versions wrote


class StoredTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """`CommittedTurn`, but for its number, which is in the record's name."""

    at: float
    text: bytes  # digest of tokenizer and template
    length: int
    start: int
    keys: tuple[bytes, ...]
    replies: dict[int, bytes] = {}  # little-endian int32
    calls: tuple[tuple[str, bytes, bytes], ...] = ()
    handed: dict[str, bool] = {}
    usage: dict[str, int] = {}
    counts: int = 1
    # Of a record that stands for all turns of a session so far, only:
    points: dict[bytes, int] = {}
    inherited: tuple[str, ...] = ()
    made: int | None = None  # the turn that made `calls`
    tails: dict[int, bytes] = {}  # absent in what earlier versions wrote


def head_bytes(session: Session, since: float | None, unix: Moment) -> bytes:
    head = StoredHead(
        public_id=session.public_id,
        tenant=session.tenant,
        family=session.family,
        created=unix(session.created),
        active=unix(session.active),
        used=session.used,
        committed=session.committed,
        last_turn=session.last_turn,
        state=session.state.value,
        parent=session.parent,
        epoch=session.epoch,
        running=session.running,
        since=None if since is None else unix(since),
        pending=tuple(session.pending),
        history=tuple(
            (step.state.value, unix(step.at), step.turn, _raw(step.reason), tuple(map(_raw, step.tools)))
            for step in session.history
        ),
        said=StoredSaid(
            _stored_wait(session.said.wait, unix),
            _stored_wait(session.said.ahead, unix),
            session.said.priority,
            session.said.retain,
            session.said.lent,
        ),
    )
    return msgspec.msgpack.encode(head)


def turn_bytes(turn: CommittedTurn, text: bytes, unix: Moment) -> bytes:
    stored = StoredTurn(
        at=unix(turn.at),
        text=text,
        length=turn.length,
        start=turn.start,
        keys=turn.keys,
        replies={index: pack_tokens(ids) for index, ids in turn.replies.items()},
        calls=tuple((call.id, _raw(call.name), _raw(call.arguments)) for call in turn.calls),
        handed=dict(turn.handed),
        usage=dict(turn.usage),
        counts=turn.counts,
        points={} if turn.folded is None else dict(turn.folded.points),
        inherited=() if turn.folded is None else tuple(sorted(turn.folded.inherited)),
        tails={index: _raw(tail) for index, tail in turn.tails.items()},
        made=None if turn.folded is None else max((call.turn for call in turn.calls), default=0),
    )
    return msgspec.msgpack.encode(stored)


def read_session(
    key: str,
    head_raw: bytes,
    turns_raw: Mapping[int, bytes],
    text: bytes,
    monotonic: Moment,
    *,
    to_come: Moment,
) -> tuple[Session, float | None]:
    """A session, and since when it waits for tools. ValueError where its records do not make one.

    A turn that was cut off is still `running` in it. `monotonic` is for moments that are past, `to_come` for
    those that need not be.
    """
    head = msgspec.msgpack.decode(head_raw, type=StoredHead)
    session = Session(
        key=SessionId(key),
        public_id=head.public_id,
        tenant=head.tenant,
        family=SessionId(head.family),
        parent=head.parent,
        created=monotonic(head.created),
        active=0.0,
    )
    numbers = sorted(turns_raw)
    for number in numbers:
        session.add(_turn(number, turns_raw[number], text, monotonic, len(session.chain)))
    last = numbers[-1] if numbers else 0
    done = head.running is not None and head.running == last
    if session.committed != head.committed + done or last > head.last_turn:
        raise ValueError(f"{session.committed} turns up to {last}, its head knows {head.committed}")
    if head.running not in (None, head.last_turn):
        raise ValueError(f"it runs turn {head.running} after turn {head.last_turn}")
    _complete(session, head, done, monotonic, to_come)
    if not done:
        return session, None if head.since is None else monotonic(head.since)
    session.rest(TurnId(last), session.active)
    return session, session.active if session.pending else None


def _complete(session: Session, head: StoredHead, done: bool, monotonic: Moment, to_come: Moment) -> None:
    """What the turns do not say; `done`: the last of them came after the head."""
    session.state = SessionState(head.state)
    session.last_turn, session.epoch, session.used = head.last_turn, head.epoch, head.used
    session.said = _said(head.said, monotonic, to_come)
    session.history = deque(
        Transition(SessionState(state), monotonic(at), TurnId(turn), _text(reason), tuple(map(_text, tools)))
        for state, at, turn, reason, tools in head.history
    )
    if done:
        session.said = session.said.completed(session.active)
        return
    session.running = None if head.running is None else TurnId(head.running)
    session.active = monotonic(head.active)
    if not set(head.pending) <= session.pending.keys():
        raise ValueError("it waits for calls that it did not make")
    session.pending = {id_: session.pending[id_] for id_ in head.pending}


def _stored_wait(wait: OneWait, unix: Moment) -> StoredWait:
    since = None if wait.since is None else unix(wait.since)
    deadline = None if wait.deadline is None else unix(wait.deadline)
    return StoredWait(wait.expected, since, deadline, wait.final)


def _said(stored: StoredSaid, monotonic: Moment, to_come: Moment) -> Said:
    waits = [
        OneWait(
            wait.expected,
            None if wait.since is None else monotonic(wait.since),
            None if wait.deadline is None else to_come(wait.deadline),
            wait.final,
        )
        for wait in (stored.wait, stored.ahead)
    ]
    return Said(waits[0], waits[1], stored.priority, stored.retain, stored.lent)


def _turn(number: int, raw: bytes, text: bytes, monotonic: Moment, chain: int) -> CommittedTurn:
    stored = msgspec.msgpack.decode(raw, type=StoredTurn)
    if stored.start != chain or not stored.keys:
        raise ValueError(f"turn {number} does not go on where the one before ended")
    same = stored.text == text
    made = TurnId(number if stored.made is None else stored.made)
    points = stored.points if same else dict.fromkeys(stored.points, 0)
    return CommittedTurn(
        turn=TurnId(number),
        at=monotonic(stored.at),
        start=stored.start,
        keys=stored.keys,
        replies={index: unpack_tokens(ids) for index, ids in stored.replies.items()} if same else {},
        length=stored.length if same else 0,
        calls=tuple(
            PendingCall(id_, _text(name), _text(arguments), made) for id_, name, arguments in stored.calls
        ),
        handed=stored.handed,
        usage=stored.usage,
        counts=stored.counts,
        tails={index: _text(tail) for index, tail in stored.tails.items()} if same else {},
        folded=None if stored.made is None else Folded(points, frozenset(stored.inherited)),
    )


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")
