"""A session directory without a server, and what must always be true of it."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence

from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.session_record import Claim, Lease, committed_turn
from agentserve.types import SessionState


def keys_of(messages: Sequence[str]) -> tuple[bytes, ...]:
    found, key = [], b""
    for message in messages:
        key = hashlib.sha256(key + message.encode()).digest()
        found.append(key)
    return tuple(found)


class Harness:
    def __init__(self, **bounds: int) -> None:
        count = itertools.count(1)
        self.directory = SessionDirectory(lambda: f"s{next(count)}", **bounds)
        self.now = 0.0

    def begin(
        self,
        *messages: str,
        named: str | None = None,
        calls: tuple[str, ...] = (),
        past: tuple[str, ...] = (),
        tenant: str = "t",
    ) -> Lease:
        self.now += 1
        return self.directory.begin(Claim(tenant, named, calls, keys_of(messages), past), self.now)

    def commit(self, lease: Lease, *messages: str, calls: tuple[str, ...] = (), ids: str = "xy") -> bool:
        """`messages`: the request's messages and the reply."""
        self.now += 1
        turn = committed_turn(
            lease,
            reply=keys_of(messages)[-1],
            length=10 * len(messages),
            generated=array("i", list(ids.encode())),
            calls=[(call, "tool", "{}") for call in calls],
            now=self.now,
        )
        return self.directory.commit(lease, turn)

    def turn(self, *messages: str, calls: tuple[str, ...] = (), **who: object) -> Lease:
        lease = self.begin(*messages[:-1], **who)
        assert self.commit(lease, *messages, calls=calls)
        return lease

    def check(self) -> None:
        directory = self.directory
        sessions = list(directory._sessions.values())
        assert directory.size_bytes == sum(session.cost for session in sessions)
        assert {s.key for s in directory._public.values()} == {s.key for s in sessions}
        points = {(s.tenant, point, s.key) for s in sessions for point in s.points}
        indexed = {(t, p, key) for (t, p), names in directory._lineages.points.items() for key in names}
        assert points == indexed
        calls = {(s.tenant, call): s.key for s in sessions for call in s.issued}
        assert all(s.pending.keys() <= s.issued.keys() for s in sessions)
        assert calls == directory._lineages.calls
        waiting = {s.key for s in sessions if s.state is SessionState.WAITING_TOOL and s.running is None}
        assert waiting == directory._waits.keys()
        assert list(directory._waits.values()) == sorted(directory._waits.values())
        assert all(s.pending for s in sessions if s.key in waiting)
