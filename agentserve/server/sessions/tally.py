"""What the records of sessions add up to, so that a loss is noticed.

A file whose pages are sound may still be one of before: a page of it, or all of it, as it was some time
ago. So each transaction writes, beside its own number, how many records there are and the sum of their
digests; and the server that wrote them remembers the sum of each session.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

TALLY_NAME = b"tally"
_TOLD = struct.Struct("<QQQ")
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Told:
    """What a file says that it has."""

    transaction: int
    rows: int
    total: int

    @staticmethod
    def read(content: bytes | None) -> Told | None:
        if content is None or len(content) != _TOLD.size:
            return None
        return Told(*_TOLD.unpack(content))

    def packed(self) -> bytes:
        return _TOLD.pack(self.transaction, self.rows, self.total)


@dataclass(slots=True)
class Tally:
    """Of records that are there, or of the changes that a transaction makes. A record counts with the
    first 8 bytes of its sealed form, which are its digest."""

    rows: int = 0
    total: int = 0
    sums: dict[bytes, int] = field(default_factory=dict)  # by session; none where there are no records

    def add(self, name: bytes, sealed: bytes) -> None:
        self._move(1, _session(name), _digest(sealed))

    def take(self, name: bytes, sealed: bytes) -> None:
        self._move(-1, _session(name), -_digest(sealed))

    def merge(self, changes: Tally) -> None:
        self.rows += changes.rows
        for session, amount in changes.sums.items():
            self._move(0, session, amount)

    def told(self, transaction: int, changes: Tally) -> Told:
        """What a transaction that makes these changes is to say."""
        return Told(transaction, max(0, self.rows + changes.rows), (self.total + changes.total) & _MASK)

    def left(self, session: bytes, changes: Tally) -> bool:
        """Whether the session still has records after a transaction that makes these changes."""
        return (self.sums.get(session, 0) + changes.sums.get(session, 0)) & _MASK != 0

    def agrees(self, told: Told) -> bool:
        return (self.rows, self.total) == (told.rows, told.total)

    def differing(self, other: Tally) -> set[bytes]:
        """Sessions that do not have the same records in both."""
        return {name for name, _ in self.sums.items() ^ other.sums.items()}

    def _move(self, rows: int, session: bytes, by: int) -> None:
        self.rows += rows
        self.total = (self.total + by) & _MASK
        amount = (self.sums.get(session, 0) + by) & _MASK
        if amount:
            self.sums[session] = amount
        else:
            self.sums.pop(session, None)


def _session(name: bytes) -> bytes:
    return name.partition(b"\0")[0]


def _digest(sealed: bytes) -> int:
    return int.from_bytes(sealed[:8], "little")
