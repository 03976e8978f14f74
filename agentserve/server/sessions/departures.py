"""Sessions that nobody is expected back to: what is known of it here, and why.

Whoever is wrong about it loses nothing but speed: such a session stays, and goes on like any other; only
its KV goes before that of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentserve.server.sessions.session_record import Lease, Leaving, Session, common
from agentserve.types import SessionId, SessionState
from tiering.hints import Said
from tiering.policy.base import Departure


@dataclass(frozen=True, slots=True)
class Left:
    """A session that was left behind while it rests."""

    key: SessionId
    why: Departure
    reason: str
    at: float  # monotonic clock, seconds
    waited: bool = False  # its wait for tools is over with this


def why_left(old: Session, keys: Sequence[bytes]) -> Departure | None:
    """What a turn on the history `keys` makes of `old`, whose lineage it is said to be of, when it is
    complete. None: nothing, as far as is known.

    Agents share one name among sub-agents, whose histories have nothing in common but perhaps a system
    prompt, and begin while their parent waits for a tool or runs; so only a session at rest that waits
    for nothing is left behind, and only for a history that begins as its own does.
    """
    shared = common(old.chain, keys)
    rests = old.running is None and old.state is not SessionState.WAITING_TOOL
    if not shared or not rests or old.extended_by(keys):
        return None
    has_reply = any(index < shared for index in old.replies)
    if has_reply or any(key in old.points for key in old.chain[:shared]) or len(keys) >= len(old.chain):
        return Departure.SUPERSEDED  # it branches off in the middle: an answer or a question was changed
    return Departure.COMPACTED


class Departures:
    """The part of a directory that keeps what clients say of sessions, and which were left behind."""

    def __init__(self, sessions: Mapping[SessionId, Session]) -> None:
        self._sessions = sessions
        self._left: list[Left] = []

    def take(self) -> list[Left]:
        """Sessions that were left behind since the last call. Some may have gone on meanwhile."""
        left, self._left = self._left, []
        return left

    def leave(
        self, session: Session, why: Departure, reason: str, now: float, *, waited: bool = False
    ) -> None:
        session.left = why
        self._left.append(Left(session.key, why, reason, now, waited))

    def of(self, source: Session, keys: tuple[bytes, ...]) -> Leaving | None:
        """Whose place a turn on `keys`, which does not extend `source`, takes: that of the last in its
        line."""
        seen = {source.key}  # a line has an end, whatever becomes of those who set heirs
        while source.heir is not None and (heir := self._sessions.get(source.heir)) is not None:
            if heir.key in seen:
                break
            seen.add(heir.key)
            source = heir
        why = why_left(source, keys)
        return None if why is None else Leaving(source, source.last_turn, why)

    def completed(self, lease: Lease, now: float) -> None:
        """A turn is committed; whom it leaves behind is left, unless another turn of it began."""
        leaving, session = lease.leaves, lease.session
        if leaving is not None:
            old = leaving.session
            if self._sessions.get(old.key) is old and not old.running and old.last_turn == leaving.turn:
                old.heir = lease.key
                self.leave(old, leaving.why, f"went on in {session.public_id}", now)
        session.said = session.said.completed(now)
        self._finish(session, now)

    def rolled_back(self, session: Session, now: float, *, abandoned: bool) -> None:
        """A turn came to nothing. abandoned: its client has gone away."""
        session.said = session.said.rolled_back(now)
        if abandoned:
            self.leave(session, Departure.ABANDONED, "its client went away while its turn ran", now)
        self._finish(session, now)

    def hinted(self, session: Session, said: Said, now: float) -> None:
        """Its client says this of it."""
        session.said = said
        if session.running is None and session.left is not Departure.FINISHED:
            self._finish(session, now)

    def back(self, session: Session, now: float) -> bool:
        """Its client is heard of. True if nobody expected that, and it is expected again from now on."""
        if session.left is None or session.said.final:
            return False
        session.said, session.left = session.said.heard_from(now), None
        return True

    def overdue(self, waiting: Iterable[SessionId], now: float) -> None:
        for key in waiting:
            session = self._sessions[key]
            deadline = session.said.wait.deadline
            if deadline is not None and deadline <= now and session.left is None:
                self.leave(session, Departure.ABANDONED, "its deadline has passed", now)

    def _finish(self, session: Session, now: float) -> None:
        if session.said.final:
            self.leave(session, Departure.FINISHED, "its client says that it is over", now)
