"""Whether the disk is in order, and what was found wrong below the device so far. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tiering.types import NEWS, SHUT, Move, TierFault, TransferDone


class DiskHealth:
    """Judges the disk by what became of its transfers, and counts faults."""

    def __init__(self) -> None:
        self.faults: dict[TierFault, int] = {}
        self._errors: dict[Move, str] = {}  # by what failed and has not succeeded since; latest last

    @property
    def error(self) -> str:
        """Why the disk is not used now; empty while it is in order, or not there."""
        return next(reversed(self._errors.values()), "")

    def note(self, faults: Iterable[TierFault]) -> None:
        """Count what was found wrong."""
        for fault in faults:
            self.faults[fault] = self.faults.get(fault, 0) + 1

    def absent(self, error: str) -> None:
        """There should be a disk, and there is none."""
        self._errors[Move.WRITE] = error
        self.note((TierFault.UNOPENED,))

    def hear(self, done: TransferDone) -> None:
        """The disk says how it is, though nobody ordered anything. Of other ends nothing is heard."""
        if done.id == NEWS:
            self.note(done.faults)
            if done.ok or done.error:
                self.judge(Move.WRITE, any(done.ok), done)

    def judge(self, move: Move, any_ok: bool, done: TransferDone) -> bool:
        """A transfer of the disk has ended; any_ok: blocks were moved. True if writes had better wait.

        A full disk can still be read: an error is cleared by what succeeds at the same, or by a write,
        at all. A disk whose blocks are damaged is in order; it is they that are gone. That one
        was given up is no news: why has been told.
        """
        if any_ok:
            for cleared in Move if move is Move.WRITE else (move,):
                self._errors.pop(cleared, None)
            return False
        if not done.error or (move is Move.FETCH and TierFault.UNREADABLE not in done.faults):
            return False
        refused = self._errors.keys() - {Move.FETCH}
        if move is not Move.FETCH and not refused and not done.error.startswith(SHUT):
            self.note((TierFault.UNWRITABLE,))
        self._errors.pop(move, None)
        self._errors[move] = done.error
        return move is not Move.FETCH
