"""Whose history is it: sessions by the points where their turns ended, and by the calls they made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from agentserve.server.sessions.session_record import Claim, Session
from agentserve.types import SessionId


class Lineages:
    """Indexes of a directory's sessions. Names only: what a session is, the directory knows."""

    def __init__(self) -> None:
        self.points: dict[tuple[str, bytes], dict[SessionId, None]] = {}
        self.calls: dict[tuple[str, str], SessionId] = {}  # who made a call, answered or not
        self.cut: Counter[tuple[str, str]] = Counter()  # calls that nobody is to run; sessions that have them

    def ended(self, session: Session, key: bytes) -> None:
        """A turn of the session ended at this key of its chain."""
        self.points.setdefault((session.tenant, key), {})[session.key] = None

    def made(self, session: Session, calls: Mapping[str, bool]) -> None:
        """Calls of its own, and whether they are to be run."""
        self.calls.update(((session.tenant, call), session.key) for call in calls)
        self.handed(session, calls)

    def handed(self, session: Session, calls: Mapping[str, bool]) -> None:
        """Those that its parent made."""
        self.cut.update((session.tenant, call) for call, runs in calls.items() if not runs)

    def add(self, session: Session) -> None:
        """All of a session; a fork's first calls are its parent's."""
        for point in session.points:
            self.ended(session, point)
        inherited = {call: runs for call, runs in session.issued.items() if call in session.inherited}
        self.handed(session, inherited)
        self.made(session, {call: runs for call, runs in session.issued.items() if call not in inherited})

    def remove(self, session: Session) -> None:
        for point in session.points:
            names = self.points[(session.tenant, point)]
            names.pop(session.key, None)
            if not names:
                del self.points[(session.tenant, point)]
        for call, runs in session.issued.items():
            if not runs:
                self.cut[(session.tenant, call)] -= 1
                if not self.cut[(session.tenant, call)]:
                    del self.cut[(session.tenant, call)]
            if self.calls.get((session.tenant, call)) == session.key:
                del self.calls[(session.tenant, call)]

    def maker(self, tenant: str, call: str) -> SessionId | None:
        return self.calls.get((tenant, call))

    def issuer(self, claim: Claim) -> SessionId | None:
        """The session that made the calls: those with results here, else the latest in the history.

        Equal histories of two clients differ in their call ids alone, so these decide whose it is.
        """
        for call in (*claim.call_ids, *reversed(claim.history_calls)):
            key = self.calls.get((claim.tenant, call))
            if key is not None:
                return key
        return None

    def anchor(
        self,
        claim: Claim,
        public: Mapping[tuple[str, str], Session],
        sessions: Mapping[SessionId, Session],
    ) -> tuple[Session | None, str | None]:
        """Of whose family the request is, and the name of a session that has to be opened for it."""
        if claim.named is None:
            issuer = self.issuer(claim)
            return (None if issuer is None else sessions[issuer]), None
        known = public.get((claim.tenant, claim.named))
        if known is not None:
            return known, None
        return public.get((claim.tenant, claim.parent or "")), claim.named

    def longest(
        self, claim: Claim, anchor: Session | None, sessions: Mapping[SessionId, Session]
    ) -> Session | None:
        """The longest committed history that is a proper prefix: in the anchor's family, or, without an
        anchor, in any but those that began as forks. Forks are for those who name them.

        At equal length what can simply go on (at its tip, at rest), the anchor first, then the latest used.
        """
        for key in reversed(claim.keys[:-1]):
            names = self.points.get((claim.tenant, key))
            if not names:
                continue
            at_key = [sessions[name] for name in names]
            if anchor is not None:
                at_key = [session for session in at_key if session.family == anchor.family]
            else:
                at_key = [session for session in at_key if not session.forked]
            if at_key:
                return max(at_key, key=lambda s: (s.tip == key, s is anchor, not s.running, s.active))
        return None

    def source(
        self,
        claim: Claim,
        public: Mapping[tuple[str, str], Session],
        sessions: Mapping[SessionId, Session],
    ) -> Session | None:
        """The session that the claim goes on from, or branches off."""
        anchor, opened = self.anchor(claim, public, sessions)
        if anchor is None and opened:
            return None  # named, and nobody's
        return self.longest(claim, anchor, sessions) or anchor
