"""Random histories of a directory with a book: what is read back is what was there, turn for turn."""

from __future__ import annotations

import itertools
from array import array
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.clock import VirtualClock
from agentserve.server.sessions.directory import DirectoryFull, SessionDirectory
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.session_record import Claim, Lease, Session, committed_turn
from agentserve.types import SessionId, SessionState, TurnId
from tests.directory_rig import keys_of
from tests.session_stores import MemoryStore

WAIT = 3.0
TENANT = "t"


class Server:
    """A directory, its journal and a disk; it can be started again at any moment."""

    def __init__(self, **bounds: int) -> None:
        self.store = MemoryStore()
        self.clock = VirtualClock()
        self.bounds = bounds
        self.names = itertools.count(1)
        self.running: list[tuple[Lease, list[str]]] = []
        self.histories: list[tuple[list[str], tuple[str, ...]]] = [([], ())]  # messages, calls at the end
        self.directory, self.journal = self.opened()

    def opened(self) -> tuple[SessionDirectory, Journal]:
        """What a start on the disk as it is now finds."""
        journal = Journal(self.store, b"text", self.clock, self.clock.now)  # type: ignore[arg-type]
        directory = SessionDirectory(
            lambda: f"s{next(self.names)}", max_wait=WAIT, book=journal, **self.bounds
        )
        directory.restore(journal.sessions(), self.clock.now())
        assert journal.skipped == 0
        return directory, journal

    def flush(self) -> None:
        self.journal.retry().result(30)

    def start_again(self) -> None:
        self.flush()
        assert self.journal._writer.close(30)
        self.directory, self.journal = self.opened()
        self.running.clear()

    def begin(self, pick: int, named: bool, some: bool) -> None:
        """A request that goes on from one of the histories; `some`: it brings one result only."""
        messages, calls = self.histories[-1 - pick % len(self.histories)]  # late ones more often
        calls = calls[:1] if some else calls
        asked = [*messages, *(f"result {call}" for call in calls), f"u{pick}"]
        claim = Claim(TENANT, f"n{pick}" if named else None, calls, keys_of(asked), calls)
        try:
            lease = self.directory.begin(claim, self.clock.now())
        except DirectoryFull:
            return
        self.running.append((lease, asked))
        for state in (SessionState.PREFILLING, SessionState.DECODING):
            self.directory.note(lease.session, lease.turn, state, self.clock.now())

    def commit(self, place: int, calls: int) -> None:
        lease, asked = self.running.pop(place % len(self.running))
        made = [(f"call {next(self.names)}", "tool", '{"a": "\ud800"}') for _ in range(calls)]
        turn = committed_turn(
            lease,
            reply=keys_of([*asked, "a"])[-1],
            length=10 * len(asked),
            generated=array("i", [lease.turn, 7]) if lease.turn % 3 else None,
            calls=made,
            handed={f"cut {made[0][0]}": False} if made else {},
            now=self.clock.now(),
            tail="assistant: " * (lease.turn % 2),
            usage={"prompt_tokens": len(asked)},
        )
        self.directory.write(lease, turn)
        if self.directory.commit(lease, turn):
            self.histories.append(([*asked, "a"], tuple(id_ for id_, _, _ in made)))

    def step(self, action: str, pick: int, more: int) -> None:
        if action == "begin":
            self.begin(pick, named=more == 3, some=more == 2)
        elif action == "commit" and self.running:
            self.commit(pick, more)
        elif action == "rollback" and self.running:
            lease, _ = self.running.pop(pick % len(self.running))
            self.directory.rollback(lease, self.clock.now(), "went \ud800 away")
        elif action == "cut off" and self.running:
            lease, asked = self.running[pick % len(self.running)]
            reply = keys_of([*asked, "lost"])[-1]
            self.directory.write(
                lease,
                committed_turn(lease, reply=reply, length=1, generated=None, calls=[], now=self.clock.now()),
            )  # the client left while the disk wrote: a rollback follows
            self.running.remove((lease, asked))
            self.directory.rollback(lease, self.clock.now(), "cancelled")
        elif action == "fork":
            whole = [session for session in self.directory.sessions(TENANT) if session.committed]
            if whole:
                source = whole[pick % len(whole)]
                pending = list(source.pending.values())[: more if more < 3 else None]
                with suppress(DirectoryFull):
                    self.directory.fork(source, len(source.chain), pending, self.clock.now())
        elif action == "close":
            sessions = list(self.directory.sessions(TENANT))
            if sessions:
                self.directory.close(sessions[pick % len(sessions)])
        elif action == "wait":
            self.clock.advance_to(self.clock.now() + more)
            self.directory.end_waits(self.clock.now())
        elif action == "restart":
            self.start_again()
        elif action == "lose":
            self.lose(pick, everything=more == 3)

    def lose(self, pick: int, everything: bool) -> None:
        """Records of sessions go, and they are written again from memory."""
        known = [k for k in self.journal._mender.known.values() if k.session.committed]
        self.flush()
        for place in sorted(self.store.records, key=str)[pick :: 1 if everything else 3]:
            del self.store.records[place]
        for k in known:
            self.journal._whole(k)


def at_rest(directory: SessionDirectory, session: Session) -> dict[str, Any]:
    """Everything that is said of a session without a running turn."""
    names = set(Session.__slots__) - {"engine_turn", "booked", "booking", "history", "left", "heir"}
    facts = {name: getattr(session, name) for name in names}
    return facts | {"history": list(session.history), "since": directory._waits.get(session.key)}


def interrupted(before: Session, after: Session, now: float) -> None:
    """A turn was cut off: as it was before that turn, and its number is not used again."""
    kept = ("public_id", "parent", "family", "committed", "chain", "replies", "points", "pending", "issued")
    for name in (*kept, "tails", "usage", "last_turn", "created", "used", "length"):
        assert getattr(after, name) == getattr(before, name), name
    assert (after.epoch, after.running) == (before.epoch + 1, None)
    assert after.state is (SessionState.WAITING_TOOL if after.pending else SessionState.IDLE)
    assert (after.history[-1].at, after.history[-1].turn) == (now, before.running)


def check(server: Server) -> None:
    server.flush()
    before = server.directory
    after, journal = server.opened()
    known = [session for session in before._sessions.values() if session.committed]
    assert list(after._sessions) == [session.key for session in known]
    for session in known:
        found = after._sessions[session.key]
        if session.running is not None:
            interrupted(session, found, server.clock.now())
        else:
            assert at_rest(after, found) == at_rest(before, session)
            assert after.get(TENANT, session.public_id) is found
    asked = {(s.key, point) for s in known for point in s.points}
    assert {(key, point) for (_, point), keys in after._lineages.points.items() for key in keys} == asked
    assert after._lineages.calls == {
        (TENANT, call): s.key for s in known for call in s.issued.keys() - s.inherited
    }
    assert after.size_bytes == sum(session.cost for session in known)
    assert list(after._waits.values()) == sorted(after._waits.values())
    journal._writer.close(30)


ACTIONS = st.sampled_from(
    [
        "begin",
        "begin",
        "begin",
        "commit",
        "commit",
        "rollback",
        "cut off",
        "fork",
        "close",
        "wait",
        "restart",
        "lose",
    ]
)
STEPS = st.lists(st.tuples(ACTIONS, st.integers(0, 5), st.integers(0, 3)), min_size=12, max_size=60)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_a_directory_read_back_equals_the_one_before(steps: list[tuple[str, int, int]]) -> None:
    server = Server(max_sessions=5, history=6)
    for step in steps:
        server.step(*step)
    check(server)
    server.journal._writer.close(30)


@settings(max_examples=80, deadline=None)
@given(STEPS, st.data())
def test_a_crash_between_any_two_writes_loses_or_keeps_whole_turns(
    steps: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """Whatever had been written when the machine stopped: it can be read, and no turn is there by half."""
    server = Server(max_sessions=5, history=6)
    committed: dict[SessionId, dict[TurnId, tuple[bytes, ...]]] = {}
    for step in steps:
        server.step(*step)
        server.flush()  # every change is a group of its own
        for session in server.directory._sessions.values():
            chains = committed.setdefault(session.key, {})
            chains.setdefault(TurnId(session.committed), session.chain)
    server.journal._writer.close(30)
    groups = server.store.groups
    server.store = MemoryStore()
    for group in groups[: data.draw(st.integers(0, len(groups)), label="groups")]:
        server.store.write(group)
    found, journal = server.opened()
    for session in found._sessions.values():
        chains = committed[session.key]
        lost = keys_of([])  # a turn that was written and then cancelled is whole, too
        assert chains.get(TurnId(session.committed), lost) == session.chain or session.chain[-1] not in {
            key for chain in chains.values() for key in chain
        }
        assert session.running is None
        assert set(session.pending) <= set(session.issued)
        assert len(session.points) <= session.committed  # a fork has its parent's turns, not their ends
    journal._writer.close(30)
