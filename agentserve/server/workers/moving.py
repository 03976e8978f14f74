"""Turns that go from one worker to another of the machine for its room.

A worker that has to preempt a turn asks for another one (`Displaced`) where that is cheaper; for this it is
told what room there is (`Neighbour`). The turn waits on where it is until its worker has given it up
(`Withdraw`, `Withdrawn`): every token that it wrote there has been told by then, and the other one is given
the context with all of them, as after a worker's death. What has KV on the first one's disk is read there; so
the first one forgets the session only when the other has said something.

No ping-pong: a turn goes `MOST_MIGRATIONS` times at most, `PAUSE` seconds apart, to a worker that has fewer
turns, none of them waiting, and a tenth of its pages left with this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agentserve.messages import Close, Displaced, Neighbour, Withdraw, Withdrawn
from agentserve.server.engine_port import Silence
from agentserve.server.workers.running import RunningTurn
from agentserve.server.workers.slot import Slot
from agentserve.types import SessionId, TurnId

MOST_MIGRATIONS = 2  # of one turn
PAUSE = 5.0  # seconds between two of these
FILLED = 0.9  # of its pages: a worker takes no turn beyond that
TOLD_EVERY = 0.25  # seconds: workers hear no more often what room there is elsewhere
TOLD_FROM = 8  # nor of less than this part of the pages

Turns = Mapping[tuple[SessionId, TurnId], RunningTurn]


class Moving:
    """The fleet is its only user."""

    def __init__(self, slots: Sequence[Slot], turns: Turns, silent: Callable[[], Sequence[Silence]]) -> None:
        """silent: workers that are not counted on if there are others."""
        self._slots = slots
        self._turns = turns
        self._silent = silent
        self._told: dict[int, tuple[object, int]] = {}  # by place: the worker, and what it was told last
        self._told_at = 0.0

    def least_loaded(self) -> Slot | None:
        load, silent = self._loads(), self._quiet()
        up = [slot for slot in self._slots if slot.worker is not None]
        return min(
            up,
            key=lambda slot: (slot.index in silent, load[slot.index], slot.pages_live, slot.index),
            default=None,
        )

    def _roomiest(self, source: Slot, pages: int) -> Slot | None:
        """The worker that would take a turn of `source` which needs so many pages."""
        load, silent = self._loads(), self._quiet()
        fit = [
            slot
            for slot in self._slots
            if slot is not source
            and slot.index not in silent
            and load[slot.index] < load[source.index]
            and self._room(slot, load) >= max(pages, 1)
        ]
        return max(fit, key=lambda slot: (self._room(slot, load), -slot.index), default=None)

    def tell(self, now: float) -> None:
        """Let each worker know what room the others have, where that has changed much."""
        if len(self._slots) < 2 or now - self._told_at < TOLD_EVERY:
            return
        self._told_at = now
        load, silent = self._loads(), self._quiet()
        rooms = {slot.index: 0 if slot.index in silent else self._room(slot, load) for slot in self._slots}
        for slot in self._slots:
            best = max((room for index, room in rooms.items() if index != slot.index), default=0)
            worker, before = self._told.get(slot.index, (None, 0))
            if slot.worker is None or slot.last_view is None:
                continue
            before = before if worker is slot.worker else 0
            much = abs(best - before) * TOLD_FROM >= slot.last_view.pages or (best == 0) != (before == 0)
            if much:
                self._told[slot.index] = slot.worker, best
                slot.send(Neighbour(best))

    def asked(self, slot: Slot, event: Displaced, now: float) -> None:
        """A worker would let a turn go: take it at its word if another one has room."""
        turn = self._turns.get((event.session, event.turn))
        if turn is None or turn.slot != slot.index or turn.aborted or turn.leaving:
            return
        if turn.migrations >= MOST_MIGRATIONS or now - turn.migrated_at < PAUSE:
            return
        if self._roomiest(slot, event.pages) is not None:
            turn.leaving, turn.pages = True, event.pages
            slot.send(Withdraw(event.session, event.turn))

    def withdrawn(self, slot: Slot, event: Withdrawn, now: float) -> tuple[RunningTurn, Slot | None] | None:
        """A worker has answered. The turn, if it gave it up, and who has room for it, if anybody has yet."""
        turn = self._turns.get((event.session, event.turn))
        if turn is None or turn.slot != slot.index or not turn.leaving:
            return None
        if event.usage is None:
            turn.leaving = False
            return None
        turn.migrated(event.usage, now)
        target = self._roomiest(slot, turn.pages)
        if target is None:
            turn.migrations -= 1  # it goes on where it was
        return turn, target

    def close_behind(self, turn: RunningTurn) -> None:
        """The turn has gone on, or is over: the workers that it left may forget its session."""
        for index in turn.behind:
            if index != turn.slot:
                self._slots[index].send(Close(turn.command.session))
        turn.behind.clear()

    def _quiet(self) -> set[int]:
        return {silence.worker for silence in self._silent()}

    def _loads(self) -> dict[int, int]:
        load = dict.fromkeys(range(len(self._slots)), 0)
        for turn in self._turns.values():
            if turn.slot is not None:
                load[turn.slot] += 1
        return load

    def _room(self, slot: Slot, load: Mapping[int, int]) -> int:
        """Pages that a turn from elsewhere may have there; 0 while others wait, or are on their way."""
        view = slot.last_view
        if slot.worker is None or view is None or view.waiting or load[slot.index] > view.running:
            return 0
        return max(0, int(view.pages * FILLED) - view.pages_live)
