"""The session directory: committed turns, pending tool calls and lineage of every session.

The truth from which a worker's session is re-opened, and the answer to "whose session is it?".
Plain values, no event loop: every method runs to its end, so a turn is committed or it is not.

A session's *chain* has one canonical key per message of its committed history, each key naming all
messages up to there. A request extends a session when its keys run through the session's last one.

A session whose last turn ended in tool calls waits for their results. The wait ends when they come,
here or through a sibling, or after `max_wait` seconds: clients die, and waits without end would
fill every place. Results that come later are still taken.

A *book*, where there is one, is told every change that must outlive the process, when it happens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from agentserve.server.sessions.book import Book
from agentserve.server.sessions.departures import Departures
from agentserve.server.sessions.lineage import Lineages
from agentserve.server.sessions.room import NO_QUOTA, DirectoryFull, Quota, Room, TenantFull, longest_unused
from agentserve.server.sessions.session_record import (
    SESSION_BYTES,
    Claim,
    CommittedTurn,
    Lease,
    PendingCall,
    Session,
    common,
)
from agentserve.types import SessionId, SessionState, TurnId
from tiering.policy.base import Departure


class SessionDirectory:
    """All sessions of one server, bounded in number and bytes."""

    def __init__(
        self,
        new_id: Callable[[], str],
        *,
        max_sessions: int = 10_000,
        max_bytes: int = 1 << 30,
        history: int = 256,
        max_wait: float = 3600.0,
        book: Book | None = None,
        quota: Callable[[str], Quota] = lambda tenant: NO_QUOTA,
    ) -> None:
        """`quota`: of one tenant; its own longest unused sessions go for what is beyond it."""
        self._new_id = new_id
        self._history = history
        self._max_wait = max_wait
        self._book = book
        self._sessions: OrderedDict[SessionId, Session] = OrderedDict()  # least recently used first
        self._public: dict[tuple[str, str], Session] = {}
        self._lineages = Lineages()
        self._waits: OrderedDict[SessionId, float] = OrderedDict()  # since when; the longest first
        self._evicted: list[SessionId] = []
        self.departures = Departures(self._sessions)
        self._room = Room(max_sessions, max_bytes, quota)
        self._leases = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def durable(self) -> bool:
        return self._book is not None

    @property
    def size_bytes(self) -> int:
        return self._room.bytes

    def count(self, tenant: str) -> int:
        """How many sessions a tenant has."""
        return self._room.of(tenant).sessions

    def get(self, tenant: str, public_id: str) -> Session | None:
        return self._public.get((tenant, public_id))

    def find(self, key: SessionId) -> Session | None:
        return self._sessions.get(key)  # None: it was closed or forgotten

    def sessions(self, tenant: str) -> Iterator[Session]:
        """Most recently used first."""
        return (s for s in reversed(self._sessions.values()) if s.tenant == tenant)

    def cut(self, tenant: str, call_id: str) -> bool:
        """Whether a session that is still known has a tool call of this id that is not to be run."""
        return (tenant, call_id) in self._lineages.cut

    def foresee(self, claim: Claim) -> Session | None:
        """Whose history `begin` would go on from; nothing is leased."""
        return self._lineages.source(claim, self._public, self._sessions)

    def by_state(self) -> dict[SessionState, int]:
        counts = Counter(session.state for session in self._sessions.values())
        return {state: counts[state] for state in SessionState}

    def take_evicted(self) -> list[SessionId]:
        """Sessions forgotten since the last call; the engine may forget them too."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def restore(self, sessions: Iterable[tuple[Session, float | None]], now: float) -> None:
        """Take in what a book gives back, each with the moment since when it waits for tools. A turn that
        ran when the process died is rolled back. Of too many, those used last stay."""
        waits: list[tuple[float, SessionId]] = []
        undone: list[Session] = []
        for session, since in sorted(sessions, key=lambda item: item[0].used):
            self._sessions[session.key] = self._public[(session.tenant, session.public_id)] = session
            session.booked = True
            session.history = deque(session.history, self._history)
            self._lineages.add(session)
            self._room.take(session.tenant, session.cost, 1)
            self._leases = max(self._leases, session.used)
            if session.come_back(now):
                since = now if session.pending else None
                undone.append(session)
            if since is not None:
                waits.append((since, session.key))
        self._waits = OrderedDict((key, since) for since, key in sorted(waits))
        for session in undone:
            self.keep(session)
        self._make_room()

    # --- whose session is it ---------------------------------------------------------

    def begin(self, claim: Claim, now: float) -> Lease:
        """Find or open the session this request belongs to and lease its next turn.

        Order: the named session's lineage; that of the session which issued the tool calls; the
        longest committed lineage the messages extend; a new session (a named one is of its parent's
        family, if that is known, and shares what they have in common). Where the last committed turn
        is not extended, or a turn runs, the request gets a copy-on-write sibling.
        """
        self.end_waits(now)
        anchor, named = self._lineages.anchor(claim, self._public, self._sessions)
        alone = anchor is None and named
        found = None if alone else self._lineages.longest(claim, anchor, self._sessions)
        if found is not None and not named and found.running is None and found.extended_by(claim.keys):
            return self._lease(found, claim.keys, now, claim.call_ids)
        source = found or anchor
        if source is None:
            opened = self._open(claim.tenant, named, now)
            opened.last_turn = claim.turns
            return self._lease(opened, claim.keys, now, claim.call_ids, opened=True)
        lease = self.sibling(source, claim.keys, now, claim.call_ids, named)
        # Without a name or a call of its own a history may be that of two clients.
        known = anchor is not None and not named
        return replace(lease, leaves=self.departures.of(source, claim.keys)) if known else lease

    def extend(self, session: Session, keys: tuple[bytes, ...], now: float) -> Lease | None:
        """Lease the next turn of this very session; None where a turn runs, or the keys do not extend it."""
        self.end_waits(now)
        there = session.key in self._sessions and not session.running and session.extended_by(keys)
        return self._lease(session, keys, now, ()) if there else None

    def fork(self, source: Session, messages: int, pending: Sequence[PendingCall], now: float) -> Session:
        """A session at rest on the first messages, waiting for `pending`. ValueError: no turn ended there."""
        if not source.ended_at(messages):
            raise ValueError(f"no turn ended with message {messages}")
        self._use(source)  # not the one to make room
        self.keep(source)
        child = self._open(source.tenant, None, now, parent=source)
        child.inherit(source, messages, pending)
        self._use(child)
        self._lineages.ended(child, child.chain[-1])
        self._lineages.handed(child, child.issued)
        self._room.take(child.tenant, child.cost - SESSION_BYTES)
        self._rest(child, TurnId(child.last_turn), now, f"forked from {source.public_id}")
        if self._book is not None:
            child.booked = True
            child.booking = self._book.open(child, child.beginning(), self._waits.get(child.key))
        self._make_room(0, child.tenant)
        return child

    def sibling(
        self,
        source: Session,
        keys: tuple[bytes, ...],
        now: float,
        answers: tuple[str, ...] = (),
        named: str | None = None,
    ) -> Lease:
        """Lease the first turn of a new session that shares `source`'s committed history."""
        child = self._open(source.tenant, named, now, parent=source)
        shared = common(source.chain, keys)
        child.share_replies(source, shared)
        child.chain = source.chain[:shared]
        self._room.take(child.tenant, child.cost - SESSION_BYTES)
        begin = source.tokens_at(shared)
        return self._lease(child, keys, now, answers, copied_from=source, shared=begin, opened=True)

    def _open(self, tenant: str, named: str | None, now: float, parent: Session | None = None) -> Session:
        self._make_room(1, tenant)
        key = SessionId(self._new_id())
        while key in self._sessions or (tenant, key) in self._public:
            key = SessionId(self._new_id())  # a client may have named a session like this
        session = Session(
            key=key,
            public_id=named if named is not None else str(key),
            tenant=tenant,
            family=parent.family if parent else key,
            parent=parent.public_id if parent else None,
            created=now,
            active=now,
            history=deque(maxlen=self._history),
        )
        self._sessions[key] = session
        self._public[(tenant, session.public_id)] = session
        self._room.take(tenant, session.cost, 1)
        return session

    def _lease(
        self,
        session: Session,
        keys: tuple[bytes, ...],
        now: float,
        answers: tuple[str, ...],
        *,
        copied_from: Session | None = None,
        shared: int = 0,
        opened: bool = False,
    ) -> Lease:
        since = self._waits.pop(session.key, None)
        pending = [session.pending[call] for call in answers if call in session.pending]
        waits = tuple((call.name, now - since) for call in pending) if since is not None else ()
        session.last_turn += 1
        session.running = TurnId(session.last_turn)
        session.active, session.left, session.heir = now, None, None
        self._use(session)
        booked = self.keep(session)
        # Its chain is a beginning of `keys` here, so all its replies are among the request's messages.
        replies = dict(session.replies)
        return Lease(
            session, session.running, keys, replies, answers, copied_from, shared, opened, waits, booked
        )

    def _use(self, session: Session) -> None:
        self._leases += 1
        session.used = self._leases
        self._sessions.move_to_end(session.key)

    # --- the end of a turn -----------------------------------------------------------

    def write(self, lease: Lease, turn: CommittedTurn, words: bytes = b"") -> Future[None] | None:
        """Tell the book of a turn that is complete, and what its session's transcript will be. It is
        committed when that is done; None: at once."""
        if self._book is None or not self.holds(lease):
            return None
        lease.session.booked = True
        return self._book.add(lease.session, turn, words)

    def keep_words(self, session: Session, words: bytes) -> Future[None] | None:
        """Its transcript changed, without a turn of its own."""
        return self._book.words(session, words) if self._book is not None and session.booked else None

    def commit(self, lease: Lease, turn: CommittedTurn) -> bool:
        """Make the turn part of its session. False when the session was closed meanwhile."""
        session = lease.session
        if not self.holds(lease):
            return False
        self._answered(lease, turn.at)
        before = session.cost
        session.add(turn)
        self._lineages.ended(session, turn.keys[-1])
        self._lineages.made(session, turn.handed)
        self._room.take(session.tenant, session.cost - before)
        self._rest(session, lease.turn, turn.at)
        self.departures.completed(lease, turn.at)
        self.end_waits(turn.at)
        self._make_room(0, session.tenant)
        return True

    def rollback(self, lease: Lease, now: float, reason: str, *, abandoned: bool = False) -> bool:
        """Undo the turn. True when its session vanished with it, for it had no other turn. abandoned: its
        client has gone away."""
        session = lease.session
        if not self.holds(lease):
            return session.key not in self._sessions
        session.running = None
        session.epoch += 1
        if not session.committed:
            self._forget(session)
            return True
        self._rest(session, lease.turn, now, reason)
        self.departures.rolled_back(session, now, abandoned=abandoned)
        if self._book is not None and session.booked:
            self._book.undo(session, lease.turn, self._waits.get(session.key))
        return False

    def unheard(self, lease: Lease, reason: str, now: float) -> None:
        """A turn was committed, and its client will never hear of it: nobody brings results for its calls."""
        session = lease.session
        alone = session.running is None and session.last_turn == lease.turn
        if alone and self._sessions.get(session.key) is session:
            self.release(session, now, reason, Departure.ABANDONED)

    def close(self, session: Session) -> Future[None] | None:
        """Forget a session; a turn that still runs will find its lease void. What is given back is done
        when a restart would not bring it back; None: at once."""
        return self._forget(session) if session.key in self._sessions else None

    def note(self, session: Session, turn: TurnId, state: SessionState, at: float, reason: str = "") -> None:
        """Record a public state. Those of a turn that no longer runs are stale and ignored."""
        if session.running == turn and session.key in self._sessions:
            session.engine_turn = turn
            session.move(state, turn, at, reason)

    def holds(self, lease: Lease) -> bool:
        """The turn may still be committed: it has not ended and its session was not closed."""
        return lease.session.key in self._sessions and lease.session.running == lease.turn

    def _rest(self, session: Session, turn: TurnId, now: float, reason: str = "") -> None:
        """The session's turn is over. Calls that had no result before it still have none after a rollback."""
        if session.pending:
            self._waits[session.key] = now
        session.rest(turn, now, reason)

    def keep(self, session: Session) -> Future[None] | None:
        """Tell the book how a session is now, but for its turns. None: nothing of it is kept, or not yet."""
        since = self._waits.get(session.key)
        return self._book.keep(session, since) if self._book is not None and session.booked else None

    # --- waits for tools -------------------------------------------------------------

    def end_waits(self, now: float) -> None:
        """Waits of more than `max_wait` seconds are over: those sessions are idle like others."""
        while self._waits:
            key, since = next(iter(self._waits.items()))
            if now - since < self._max_wait:
                return
            self.release(self._sessions[key], now, "no result came", Departure.ABANDONED)

    def end_deadlines(self, now: float) -> None:
        """Clients whose deadline has passed are not expected to bring their results any more."""
        self.departures.overdue(self._waits, now)

    def _answered(self, lease: Lease, now: float) -> None:
        """A sibling brought results: the session that made the calls need not wait for them."""
        for call in lease.answers:
            key = self._lineages.maker(lease.session.tenant, call)
            if key is None or key == lease.key or call in lease.session.pending:
                continue
            issuer = self._sessions[key]
            if issuer.pending.pop(call, None) is None:
                continue
            if not issuer.pending and issuer.running is None:
                if issuer.family == lease.session.family:  # else that session has a line of its own
                    issuer.heir = lease.key
                self.release(issuer, now, f"answered in {lease.session.public_id}", Departure.SUPERSEDED)
            else:
                self.keep(issuer)

    def release(self, session: Session, now: float, reason: str, why: Departure | None) -> bool:
        """It waits no longer. `why` it is left; None: it is idle as others are. Whether it still waited."""
        waited = self._waits.pop(session.key, None) is not None
        if waited:
            session.move(SessionState.IDLE, TurnId(session.last_turn), now, reason)
        self.keep(session)
        if why is not None:
            self.departures.leave(session, why, reason, now, waited=waited)
        return waited

    # --- bounds ----------------------------------------------------------------------

    def expire(self, now: float, ttl: float) -> None:
        """Forget sessions that were idle for `ttl` seconds. Those that wait for a tool are not idle."""
        for session in [s for s in self._sessions.values() if now - s.active >= ttl]:
            if session.running is None and session.key not in self._waits:
                self._forget(session)
                self._evicted.append(session.key)

    def _make_room(self, coming: int = 0, tenant: str | None = None) -> None:
        """Within what a tenant may have, at the cost of its own sessions; then within all there is."""
        for whose in (tenant, None) if tenant is not None else (None,):
            while self._room.beyond(coming, whose):
                givers = [whose] if whose is not None else self._room.givers(coming, tenant)
                victim = longest_unused(self._sessions.values(), self._waits, givers)
                if victim is None:
                    if coming:
                        raise TenantFull if whose is not None else DirectoryFull
                    break
                self._forget(victim)
                self._evicted.append(victim.key)

    def _forget(self, session: Session) -> Future[None] | None:
        self._waits.pop(session.key, None)
        del self._sessions[session.key]
        del self._public[(session.tenant, session.public_id)]
        self._lineages.remove(session)
        self._room.take(session.tenant, -session.cost, -1)
        session.state = SessionState.FINISHED
        return self._book.forget(session) if self._book is not None and session.booked else None
