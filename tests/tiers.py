"""Stand-ins for what moves KV and what orders it, for tests of what lies between."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from tiering.types import Block, Change, Move, Transfer, TransferDone


def transfer(number: int, move: Move = Move.SAVE, blocks: int = 1) -> Transfer:
    made = tuple(Block(bytes([number]) * 32, b"\0" * 32, b"", (7,), 3) for _ in range(blocks))
    return Transfer(number, move, made)


def done(order: Transfer, error: str = "") -> TransferDone:
    return TransferDone(order.id, (not error,) * len(order.blocks), 0.25, error)


class FakeMover:
    """Takes orders; ends them when the test says so, from whatever thread."""

    def __init__(self) -> None:
        self.taken: list[Transfer] = []
        self.changes: list[Change] = []
        self.closed = False
        self.stuck = False  # a transfer does not end
        self._ended: list[TransferDone] = []
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()

    def submit(self, order: Transfer) -> None:
        with self._lock:
            self.taken.append(order)

    def change(self, change: Change) -> None:
        with self._lock:
            self.changes.append(change)

    def finish(self, *ends: TransferDone) -> None:
        with self._lock:
            self._ended += ends
        os.write(self._write, b"x")

    def poll(self) -> list[TransferDone]:
        with self._lock:
            ends, self._ended = self._ended, []
        if ends:
            os.read(self._read, 4096)
        return ends

    def fileno(self) -> int:
        return self._read

    def close(self, timeout: float) -> bool:
        self.closed = True
        return not self.stuck

    def release(self) -> None:
        """Give the descriptors back."""
        os.close(self._read)
        os.close(self._write)


class FakeTierCore:
    """Writes the orders it is given, keeps what it is told."""

    def __init__(self) -> None:
        self.orders: list[Transfer] = []
        self.changes: list[Change] = []
        self.finished: list[tuple[tuple[TransferDone, ...], float]] = []
        self.ticks: list[float] = []
        self.timers: list[float] = []  # ascending; a tick removes those that are due

    def take_transfers(self) -> list[Transfer]:
        orders, self.orders = self.orders, []
        return orders

    def take_changes(self) -> list[Change]:
        changes, self.changes = self.changes, []
        return changes

    def finish_transfers(self, ends: Sequence[TransferDone], now: float) -> None:
        self.finished.append((tuple(ends), now))

    def next_timer(self) -> float | None:
        return self.timers[0] if self.timers else None

    def tick(self, now: float) -> None:
        self.ticks.append(now)
        self.timers = [timer for timer in self.timers if timer > now]
