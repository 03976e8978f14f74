"""What every policy remembers of sessions: when they came to rest, and whether they are expected back.

Pure and bounded: of more than `most` sessions the one untouched for longest is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiering.policy.base import Departure, Park

MOST_SESSIONS = 65536


@dataclass(slots=True)
class Entry:
    """A session that was at rest at least once."""

    park: Park  # the last one
    resting: bool
    touched: float  # when it last came to rest or went on
    gone: Departure | None = None


class KnownSessions:
    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._entries: dict[str, Entry] = {}  # least recently touched first
        self._resting = 0
        self._blocks = 0  # of all entries

    def parked(self, park: Park) -> str | None:
        """Returns a session that was forgotten for this one, if there had to be one."""
        self._remove(park.session)
        self._entries[park.session] = Entry(park, True, park.at)
        self._resting += 1
        self._blocks += park.blocks
        if len(self._entries) <= self._most:
            return None
        oldest = next(iter(self._entries))
        self._remove(oldest)
        return oldest

    def resumed(self, session: str, at: float) -> Entry | None:
        entry = self._entries.pop(session, None)
        if entry is None:
            return None
        self._entries[session] = entry
        self._resting -= entry.resting
        entry.resting, entry.touched, entry.gone = False, at, None
        return entry

    def gone(self, session: str, why: Departure) -> Entry | None:
        """A finished session is forgotten; of others it is noted. None if there is none such."""
        entry = self._entries.get(session)
        if entry is None:
            return None
        entry.gone = why
        if why is Departure.FINISHED:
            self._remove(session)
        return entry

    def get(self, session: str) -> Entry | None:
        return self._entries.get(session)

    def at_rest(self, session: str) -> Entry | None:
        entry = self._entries.get(session)
        return entry if entry is not None and entry.resting else None

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Least recently touched first."""
        return iter(self._entries.items())

    @property
    def resting(self) -> int:
        return self._resting

    @property
    def mean_blocks(self) -> float:
        """Mean size of a session; at least one block."""
        return max(self._blocks / len(self._entries), 1.0) if self._entries else 1.0

    def _remove(self, session: str) -> None:
        entry = self._entries.pop(session, None)
        if entry is not None:
            self._resting -= entry.resting
            self._blocks -= entry.park.blocks
