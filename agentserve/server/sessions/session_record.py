"""What the session directory keeps of a session, and the lease under which one turn runs."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice

from agentserve.types import SessionId, SessionState, TurnId
from tiering.hints import Said
from tiering.policy.base import Departure

KEY_BYTES = 96  # a chain key and its share of list and index
SESSION_BYTES = 2048
MOST_NAMES = 16  # of the tools that a wait is for; the history shows no more
NO_TURN = TurnId(0)  # numbers of turns begin with 1


@dataclass(frozen=True, slots=True)
class Transition:
    state: SessionState
    at: float  # monotonic clock, seconds
    turn: TurnId
    reason: str = ""
    tools: tuple[str, ...] = ()  # names of those it waits for, in call order


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A tool call that was delivered and has no result yet."""

    id: str
    name: str
    arguments: str
    turn: TurnId


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request says about whose session it belongs to."""

    tenant: str
    named: str | None  # session id from the body or a header, already checked
    call_ids: tuple[str, ...]  # tool calls whose results the request brings
    keys: tuple[bytes, ...]  # canonical chain, one key per message
    history_calls: tuple[str, ...] = ()  # all calls in the request's messages, in order
    parent: str | None = None  # the session that started the named one, where it is new
    turns: int = 0  # that the named one had before it was forgotten, where it is new


@dataclass(frozen=True, slots=True)
class Folded:
    """What several turns, told as one, leave behind that a single turn does not."""

    points: Mapping[bytes, int]  # as of a session
    inherited: frozenset[str]


@dataclass(frozen=True, slots=True)
class CommittedTurn:
    """All that one committed turn adds to its session."""

    turn: TurnId
    at: float  # monotonic clock, seconds
    start: int  # where `keys` begin in the chain; a session's first turn brings the chain it shares too
    keys: tuple[bytes, ...]  # one per message, the reply's last
    replies: Mapping[int, array[int]]  # message index -> generated ids
    length: int  # tokens of prompt and answer
    calls: tuple[PendingCall, ...]  # still to be answered
    handed: Mapping[str, bool]  # every call that the client got: is it to be run?
    usage: Mapping[str, int]
    counts: int = 1  # turns it stands for: a fork begins with those of its parent
    folded: Folded | None = None  # it stands for all turns of the session so far
    tails: Mapping[int, str] = field(default_factory=dict)  # of replies: what their prompts ended with


@dataclass(slots=True, eq=False)
class Session:
    """One session. Only the directory changes it; others read."""

    key: SessionId  # internal, never reused
    public_id: str  # unique within the tenant
    tenant: str
    family: SessionId  # key of the lineage's first session; a fork begins one of its own
    parent: str | None  # public id of the session this one was copied from
    created: float
    active: float
    state: SessionState = SessionState.IDLE
    last_turn: int = 0  # numbers are used once, also by turns that were rolled back
    committed: int = 0
    epoch: int = 0  # +1 on rollback
    running: TurnId | None = None
    engine_turn: TurnId | None = None  # the last turn whose state the engine reported
    length: int = 0  # tokens of the committed history; the ids are rendered again, with `replies`
    used: int = 0  # the directory's count of leases at its last one: larger is later
    booked: bool = False  # something of it may be in the book
    chain: tuple[bytes, ...] = ()
    replies: dict[int, array[int]] = field(default_factory=dict)  # message index -> generated ids
    tails: dict[int, str] = field(default_factory=dict)  # of replies: `ChatTemplate.tail` of their prompts
    points: dict[bytes, int] = field(default_factory=dict)  # committed at this key -> tokens up to there
    pending: dict[str, PendingCall] = field(default_factory=dict)
    issued: dict[str, bool] = field(default_factory=dict)  # all its calls, answered ones too: to be run?
    inherited: frozenset[str] = frozenset()  # those of them that its parent made
    booking: Future[None] | None = None  # of a fork: when it is on disk; None: it need not be
    history: deque[Transition] = field(default_factory=deque)
    usage: dict[str, int] = field(default_factory=dict)  # sums over committed turns
    said: Said = field(default_factory=Said)  # by its client
    # What follows is not kept on disk.
    left: Departure | None = None  # why nobody is expected back, since its last turn
    heir: SessionId | None = None  # the session that took its place, since its last turn

    def extended_by(self, keys: Sequence[bytes]) -> bool:
        """Whether a history goes on where this one ends."""
        length = len(self.chain)
        return 0 < length < len(keys) and keys[length - 1] == self.chain[-1]

    @property
    def tip(self) -> bytes | None:
        return self.chain[-1] if self.chain else None

    @property
    def forked(self) -> bool:
        """It began as a fork."""
        return self.parent is not None and self.family == self.key

    def ended_at(self, messages: int) -> bool:
        """Whether a turn of its own was committed with the first `messages` messages."""
        return 0 < messages <= len(self.chain) and self.chain[messages - 1] in self.points

    def tokens_at(self, messages: int) -> int:
        """Tokens up to the last of its first `messages` messages with which a turn ended."""
        keys = reversed(self.chain[:messages])
        return next((self.points[key] for key in keys if key in self.points), 0)

    def share_replies(self, source: Session, messages: int) -> None:
        """Those among the first messages of `source`."""
        self.replies = {i: ids for i, ids in source.replies.items() if i < messages}
        self.tails = {i: tail for i, tail in source.tails.items() if i < messages}

    def inherit(self, source: Session, messages: int, pending: Sequence[PendingCall]) -> None:
        """Begin a fork with the first messages of `source`, where a turn ended, and calls to wait for."""
        self.family = self.key
        self.chain = source.chain[:messages]
        self.share_replies(source, messages)
        self.points[self.chain[-1]] = self.length = source.points[self.chain[-1]]
        self.committed = sum(key in source.points for key in self.chain)
        self.pending = {call.id: replace(call, turn=NO_TURN) for call in pending}
        cut = (call for call, runs in source.issued.items() if not runs)
        self.issued = dict.fromkeys(cut, False) | dict.fromkeys(self.pending, True)
        self.inherited = frozenset(self.issued)
        self.engine_turn = NO_TURN

    def beginning(self) -> CommittedTurn:
        """Of a fork: what it was given, as a turn numbered 0."""
        return CommittedTurn(
            turn=NO_TURN,
            at=self.active,
            start=0,
            keys=self.chain,
            replies=self.replies,
            length=self.length,
            calls=tuple(self.pending.values()),
            handed=self.issued,
            usage={},
            counts=self.committed,
            tails=self.tails,
        )

    def folded(self) -> CommittedTurn:
        """All its turns as one, numbered 0."""
        return replace(
            self.beginning(), usage=dict(self.usage), folded=Folded(dict(self.points), self.inherited)
        )

    @property
    def cost(self) -> int:
        kept = 4 * sum(map(len, self.replies.values())) + sum(map(len, self.tails.values()))
        return SESSION_BYTES + kept + KEY_BYTES * (len(self.chain) + len(self.points) + len(self.issued))

    def add(self, turn: CommittedTurn) -> None:
        """Take a committed turn in: when it commits, and again when the session is read from disk."""
        self.running = None
        self.committed += turn.counts
        self.active = turn.at
        self.length = turn.length
        self.chain = (*self.chain[: turn.start], *turn.keys)
        self.replies = {**self.replies, **turn.replies}
        self.tails = {**self.tails, **turn.tails}
        self.points[turn.keys[-1]] = turn.length
        self.pending = {call.id: call for call in turn.calls}
        self.issued.update(turn.handed)
        if turn.folded is not None:
            self.points.update(turn.folded.points)
            self.inherited = turn.folded.inherited
        elif turn.turn == NO_TURN:
            self.inherited = frozenset(turn.handed)
        for name, amount in turn.usage.items():
            self.usage[name] = self.usage.get(name, 0) + amount

    def come_back(self, now: float) -> bool:
        """It was read from disk. A turn that ran when the process died is rolled back: whether one did."""
        turn, self.running = self.running, None
        if turn is not None:
            self.epoch += 1
            self.said = self.said.rolled_back(now)
            self.rest(turn, now, "the server was started again")
        self.left = Departure.FINISHED if self.said.final else None
        return turn is not None

    def rest(self, turn: TurnId, at: float, reason: str = "") -> None:
        """Its turn is over; it waits for the results that are still to come."""
        state = SessionState.WAITING_TOOL if self.pending else SessionState.IDLE
        tools = tuple(call.name for call in islice(self.pending.values(), MOST_NAMES))
        self.move(state, turn, at, reason, tools)

    def move(
        self, state: SessionState, turn: TurnId, at: float, reason: str = "", tools: tuple[str, ...] = ()
    ) -> None:
        if self.state is not state or reason or not self.history:
            self.history.append(Transition(state, at, turn, reason, tools))
        self.state = state


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """A session at rest whose place a turn elsewhere will take."""

    session: Session
    turn: int  # its last one: if another began since, it was not left
    why: Departure


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The right to run one turn; ends in exactly one `commit` or `rollback`."""

    session: Session
    turn: TurnId
    keys: tuple[bytes, ...]
    spliced: Mapping[int, array[int]]  # generated ids of the request's messages that match history
    answers: tuple[str, ...] = ()  # tool calls whose results the request brings
    copied_from: Session | None = None  # set when this turn opened a sibling
    shared: int = 0  # tokens that a sibling has in common with `copied_from`, at least
    opened: bool = False  # the session is new
    waits: tuple[tuple[str, float], ...] = ()  # tools whose results the request brings, and seconds waited
    booked: Future[None] | None = None  # when the turn's number is on disk; None: it need not be
    leaves: Leaving | None = None  # whom the turn leaves behind when it is complete

    @property
    def key(self) -> SessionId:
        return self.session.key


def committed_turn(
    lease: Lease,
    *,
    reply: bytes,
    length: int,
    generated: array[int] | None,
    calls: Sequence[tuple[str, str, str]],
    now: float,
    usage: Mapping[str, int] | None = None,
    handed: Mapping[str, bool] | None = None,
    tail: str = "",
) -> CommittedTurn:
    """What the turn adds to its session; nothing is changed yet.

    `reply` is the chain key with the answer, `calls` its (id, name, arguments) still to be answered,
    `handed` the ids of all calls that the client got and whether to run them, `length` the tokens
    of prompt and answer. `generated` None means that the ids do not spell the text the client got;
    the answer will be encoded afresh. `tail`: what its prompt ended with, where that is known.
    """
    first = not lease.session.committed
    start = 0 if first else len(lease.session.chain)
    replies = dict(lease.spliced) if first else {}
    tails = dict(lease.session.tails) if first else {}
    if generated is not None:
        replies[len(lease.keys)] = generated
        if tail:
            tails[len(lease.keys)] = tail
    return CommittedTurn(
        turn=lease.turn,
        at=now,
        start=start,
        keys=(*lease.keys[start:], reply),
        replies=replies,
        length=length,
        calls=tuple(PendingCall(id_, name, arguments, lease.turn) for id_, name, arguments in calls),
        handed={id_: True for id_, _, _ in calls} | dict(handed or {}),
        usage=dict(usage or {}),
        tails=tails,
    )


def common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """How many leading keys agree. Keys are chained, so agreement at i means agreement before."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
