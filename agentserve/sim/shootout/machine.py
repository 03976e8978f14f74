"""The machine of a shoot-out: an executor and a mover that take their time and do nothing else.

Whether KV is right is proved elsewhere (`agentserve.sim.executor`, by value); here only time counts,
so contexts may be long. Copies and steps do not slow each other down, which flatters whoever copies most.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable

import msgspec

from agentserve.core.plan import Chunk, ChunkResult, Plan, Sampled, StepResult
from agentserve.sim.hardware import Hardware
from tiering.types import Change, Move, Transfer, TransferDone, Word

HOST_MOVES = (Move.SAVE, Move.LOAD)


class TimedExecutor:
    """Runs a plan in no time and says how long it would have taken."""

    def __init__(self, hardware: Hardware, vocab_size: int) -> None:
        self._cost = hardware.step_cost()
        self._vocab_size = vocab_size

    def run(self, plan: Plan) -> StepResult:
        results = tuple(self._result(chunk) for chunk in plan.chunks)
        return StepResult(plan.step, results, self._cost.plan(plan))

    def _result(self, chunk: Chunk) -> ChunkResult:
        count, sampled = len(chunk.tokens), None
        if chunk.sample is not None:
            # What it says depends on who says it and where, never on how the step was cut.
            said = zlib.crc32(chunk.session.encode(), chunk.start + count)
            sampled = Sampled(said % self._vocab_size)
        return ChunkResult(chunk.session, chunk.turn, chunk.epoch, count, sampled)


class _Queue:
    """One thread's transfers: urgent ones first, then as they came; one at a time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bool, int, Transfer]] = []  # (can wait, number of its coming, what)
        self._came = 0
        self._current: tuple[float, float, Transfer] | None = None  # (ends, seconds, what)

    def add(self, transfer: Transfer) -> None:
        self._came += 1
        heapq.heappush(self._waiting, (not transfer.urgent, self._came, transfer))

    def take(self, number: int) -> Transfer | None:
        """Take a transfer out that has not begun; None: it is not here."""
        for at, (_, _, transfer) in enumerate(self._waiting):
            if transfer.id == number:
                del self._waiting[at]
                heapq.heapify(self._waiting)
                return transfer
        return None

    def start(self, at: float, hardware: Hardware) -> None:
        """If it is idle and somebody waits, begin at `at`."""
        if self._current is None and self._waiting:
            transfer = heapq.heappop(self._waiting)[2]
            seconds = transfer_seconds(transfer, hardware)
            self._current = (at + seconds, seconds, transfer)

    @property
    def ends(self) -> float | None:
        return self._current[0] if self._current is not None else None

    def finish(self, hardware: Hardware) -> tuple[float, float, Transfer]:
        assert self._current is not None
        ended, self._current = self._current, None
        self.start(ended[0], hardware)
        return ended


class VirtualMover:
    """Moves blocks in virtual time: host copies and the disk have a queue each, as the real mover's."""

    def __init__(self, hardware: Hardware) -> None:
        self.blocks = dict.fromkeys(Move, 0)  # that were moved whole
        self._hardware = hardware
        self._host, self._disk = _Queue(), _Queue()
        self._taken_back: list[TransferDone] = []

    def submit(self, transfers: Iterable[Transfer], now: float) -> None:
        """Everything that was done by `now` has been taken before."""
        for transfer in transfers:
            (self._host if transfer.move in HOST_MOVES else self._disk).add(transfer)
        self._host.start(now, self._hardware)
        self._disk.start(now, self._hardware)

    def change(self, changes: Iterable[Change]) -> None:
        """Hurry transfers or take them back, as far as they have not begun."""
        for change in changes:
            for queue in (self._host, self._disk):
                transfer = queue.take(change.id)
                if transfer is None:
                    continue
                if change.word is Word.HURRY:
                    queue.add(msgspec.structs.replace(transfer, urgent=True))
                else:
                    nothing = (False,) * len(transfer.blocks)
                    self._taken_back.append(TransferDone(transfer.id, nothing, 0.0, "", True))

    def next_done(self) -> float | None:
        if self._taken_back:
            return 0.0
        return min((queue.ends for queue in (self._host, self._disk) if queue.ends is not None), default=None)

    def done_by(self, now: float) -> list[TransferDone]:
        """What ended until `now`, in the order of ending."""
        ended = []
        for queue in (self._host, self._disk):
            while queue.ends is not None and queue.ends <= now:
                ended.append(queue.finish(self._hardware))
        ended.sort(key=lambda end: (end[0], end[2].id))
        for _, _, transfer in ended:
            self.blocks[transfer.move] += len(transfer.blocks)
        back, self._taken_back = self._taken_back, []
        return back + [
            TransferDone(transfer.id, (True,) * len(transfer.blocks), seconds)
            for _, seconds, transfer in ended
        ]


def transfer_seconds(transfer: Transfer, hardware: Hardware) -> float:
    size = len(transfer.blocks) * hardware.block_bytes
    match transfer.move:
        case Move.SAVE:
            return hardware.copy_latency + size / hardware.save_rate
        case Move.LOAD:
            return hardware.copy_latency + size / hardware.load_rate
        case Move.WRITE:
            return hardware.disk_latency + size / hardware.write_rate
        case Move.FETCH | Move.BORROW:
            return hardware.disk_latency + size / hardware.fetch_rate
        case Move.DROP | Move.PROBE:
            return hardware.disk_latency
