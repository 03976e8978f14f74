"""The mover: carries out transfers on threads of its own. Submit, then poll.

Two lanes, so that a slow disk never delays a copy in memory: SAVE and LOAD in one (two, where a device copies
both ways at once); in the other all else, each step of which may wait for the medium.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

from agentserve.clock import Clock
from tiering.stores.buffers import Bytes
from tiering.stores.disk import DiskStore
from tiering.stores.faults import HOST_COPY, Fault, no_fault
from tiering.stores.host import HostStore
from tiering.stores.lanes import Lane, Task, one_line
from tiering.stores.pages import DevicePages
from tiering.stores.peers import Peers
from tiering.types import NEWS, Block, Change, Move, Transfer, TransferDone, Word

STEP_BYTES = 8 << 20  # between two looks whether something urgent has come; and of one LMDB transaction
STEP_KEYS = 256  # the same of a question, which moves nothing
CLOSE_SECONDS = 5.0
LOOK_SECONDS = 5.0  # without an order, after which it is seen whether the disk is still there
NO_DISK = "there is no disk tier"
HOST_MOVES = (Move.SAVE, Move.LOAD)
OWN_DISK = (Move.WRITE, Move.FETCH, Move.DROP)


class Mover:
    """Moves blocks between `device`, `host` and `disk`. All methods are for one thread, the worker's.

    Every transfer that was submitted is answered by exactly one `TransferDone`, whatever happens to it.
    The stores belong to whoever made them: close them after the mover, and only if `close` says so.
    """

    def __init__(
        self,
        device: DevicePages,
        host: HostStore | None,
        disk: DiskStore | None,
        clock: Clock,
        *,
        peers: Peers | None = None,
        step_bytes: int = STEP_BYTES,
        look_seconds: float = LOOK_SECONDS,
        fault: Fault = no_fault,
    ) -> None:
        if host is not None and host.block_bytes != device.block_bytes:
            raise ValueError(f"host slots of {host.block_bytes} bytes for blocks of {device.block_bytes}")
        self._device = device
        self._clock = clock
        self._host = host
        self._disk = disk
        self._peers = peers
        self._fault = fault
        self._step_blocks = max(1, step_bytes // device.block_bytes)
        self._lock = threading.Lock()
        self._done: list[TransferDone] = []
        self._open: dict[int, Lane | None] = {}  # submitted, and not yet given out by poll
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._closed: bool | None = None
        self._failing = ""  # what the disk has said of itself last; the disk lane's own
        self._host_lane = Lane("kv-host", self._run, self._report, clock)
        # Where the two do not slow each other down, nobody who is restored waits for what is saved.
        self._save_lane = (
            Lane("kv-save", self._run, self._report, clock) if device.duplex else self._host_lane
        )
        self._disk_lane = Lane(
            "kv-disk",
            self._run,
            self._report,
            clock,
            idle=self._look,
            idle_seconds=None if disk is None else look_seconds,
        )

    @property
    def pending(self) -> int:
        """Transfers whose end `poll` has not told yet."""
        return len(self._open)

    def submit(self, transfer: Transfer) -> None:
        """Put a transfer into its queue. Returns at once. Raises ValueError for an id in use."""
        if transfer.id in self._open:
            raise ValueError(f"transfer {transfer.id} is under way already")
        lane = self._host_lane if transfer.move in HOST_MOVES else self._disk_lane
        if transfer.move is Move.SAVE:
            lane = self._save_lane
        self._open[transfer.id] = lane
        task = Task(transfer)
        if self._closed is not None:
            task.fail("the mover is closed")
            self._report(task.done())
        else:
            lane.put(task)

    def change(self, change: Change) -> None:
        """Hurry a transfer, or take it back. Its TransferDone comes all the same; it may be too late."""
        lane = self._open.get(change.id)
        if lane is None:
            return
        match change.word:
            case Word.HURRY:
                lane.hurry(change.id)
            case Word.CANCEL:
                lane.cancel(change.id)

    def poll(self) -> list[TransferDone]:
        """What has ended since the last call, in the order of ending. Never waits."""
        if not self._done:  # asked at every step; what ends this moment is told at the next
            return []
        with self._lock:
            done, self._done = self._done, []
            if self._closed is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._reader, 1)
        for end in done:
            self._open.pop(end.id, None)  # of NEWS nobody knew
        return done

    def fileno(self) -> int:
        """Readable while `poll` has something to tell. Closed by `close`."""
        return self._reader

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Take everything back and end the threads; `poll` tells the rest. Idempotent.

        Waits up to `timeout` seconds for the step that each thread is in. False if one hangs in a store
        or the device: then leave the stores open and end the process.
        """
        if self._closed is None:
            lanes = dict.fromkeys((self._host_lane, self._save_lane, self._disk_lane))
            for lane in lanes:
                lane.stop()
            ended = [lane.join(timeout) for lane in lanes]
            ended.append(all(ended) and self._device.drain(timeout))
            with self._lock:
                self._closed = all(ended)
                os.close(self._reader)
                os.close(self._writer)
        return self._closed

    def _report(self, done: TransferDone) -> None:
        with self._lock:
            self._done.append(done)
            if len(self._done) == 1 and self._closed is None:
                os.write(self._writer, b"\0")

    def _look(self) -> None:
        """A disk that nobody uses may be gone all the same: said once, and once that it is back."""
        assert self._disk is not None
        error, faults = self._disk.look(), self._disk.take_faults()
        if error != self._failing or faults:
            back = (True,) if self._failing and not error else ()
            self._report(TransferDone(NEWS, back, 0.0, error, faults=faults))
        self._failing = error

    # --- on the lanes' threads ---------------------------------------------------------------

    def _run(self, task: Task) -> Iterator[None]:
        """The steps of a transfer. Between two of them nothing is half done."""
        blocks = task.transfer.blocks
        size = STEP_KEYS if task.transfer.move is Move.PROBE else self._step_blocks
        if task.transfer.move is Move.LOAD and self._device.duplex:
            size = max(1, len(blocks))  # layer by layer through all of them
        for start in range(0, len(blocks), size):
            part = range(start, min(start + size, len(blocks)))
            match task.transfer.move:
                case Move.SAVE | Move.LOAD | Move.FETCH | Move.BORROW:
                    self._copy(task, part)
                case Move.WRITE:
                    self._write(task, part)
                case Move.DROP:
                    self._drop(task, part)
                case Move.PROBE:
                    self._probe(task, part)
            if self._disk is not None and task.transfer.move in OWN_DISK:
                task.faults += self._disk.take_faults()
            yield

    def _copy(self, task: Task, part: Sequence[int]) -> None:
        moved = []
        began = self._clock.now()
        later: float | None = None
        try:
            for at in part:
                if task.cancelled:
                    break
                task.tried = at + 1
                try:
                    error = self._copy_block(task.transfer.move, task.transfer.blocks[at], at == part[0])
                except Exception as problem:  # one block's: the others are tried all the same
                    error = one_line(problem)
                if error:
                    task.fail(error)
                else:
                    moved.append(at)
        finally:
            later = self._device.settle()  # whatever happened: nobody may get pages that are copied unseen
        if later is not None:  # prices are of what moving takes, not of ordering it
            task.seconds += max(0.0, later - (self._clock.now() - began))
        for at in moved:
            task.ok[at] = True

    def _copy_block(self, move: Move, block: Block, first: bool) -> str:
        """first: of its step."""

        def take(payload: Bytes) -> None:
            self._device.write(block.pages, payload)

        if move is Move.FETCH:
            return self._disk.fetch(block, take) if self._disk is not None else NO_DISK
        if move is Move.BORROW:
            return self._peers.fetch(block, take, look=first) if self._peers is not None else NO_DISK
        self._fault(HOST_COPY, None)
        slot = self._slot(block)
        if move is Move.SAVE:
            self._device.read(block.pages, slot)
        else:
            self._device.write(block.pages, slot)
        return ""

    def _write(self, task: Task, part: Sequence[int]) -> None:
        if self._disk is None:
            task.fail(NO_DISK)
            return
        task.tried = part[-1] + 1
        blocks = [task.transfer.blocks[at] for at in part]
        stored = self._disk.put_many([(block, self._slot(block)) for block in blocks])
        task.ok[part[0] : part[-1] + 1] = stored.ok
        task.fail(stored.error)

    def _drop(self, task: Task, part: Sequence[int]) -> None:
        if self._disk is None:
            task.fail(NO_DISK)
            return
        task.tried = part[-1] + 1
        stored = self._disk.delete_many([task.transfer.blocks[at].key for at in part])
        task.ok[part[0] : part[-1] + 1] = stored.ok
        task.fail(stored.error)

    def _probe(self, task: Task, part: Sequence[int]) -> None:
        """Nobody to ask has nothing."""
        task.tried = part[-1] + 1
        if self._peers is not None and (part[0] == 0 or task.ok[part[0] - 1]):
            keys = [task.transfer.blocks[at].key for at in part]
            task.ok[part[0] : part[-1] + 1] = self._peers.find(keys)

    def _slot(self, block: Block) -> Bytes:
        if self._host is None:
            raise ValueError("there is no host tier")
        return self._host.view(block.slot)
