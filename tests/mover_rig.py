"""A mover on real stores, whose threads are held and let go by events."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from agentserve.clock import WallClock
from tests.kv_blocks import NAMESPACE, chain
from tiering.stores.buffers import Bytes
from tiering.stores.disk import DiskStore
from tiering.stores.host import HostStore
from tiering.stores.mover import Mover
from tiering.stores.pages import PoolPages
from tiering.types import Block, Change, Move, Transfer, TransferDone, Word

PAGES = 24
PATIENCE = 60.0  # seconds: only a mover that hangs takes them


class Gate:
    """Holds threads at points of the stores until they are let go."""

    def __init__(self) -> None:
        self.reached: dict[str, threading.Semaphore] = {}
        self.open: dict[str, threading.Semaphore] = {}
        self.error: dict[str, Exception] = {}
        self.spoil: Callable[[Bytes], None] | None = None

    def hold(self, point: str) -> None:
        """From now on everybody who comes to `point` waits there."""
        self.reached[point], self.open[point] = threading.Semaphore(0), threading.Semaphore(0)

    def await_arrival(self, point: str) -> None:
        assert self.reached[point].acquire(timeout=PATIENCE)

    def let_pass(self, point: str, times: int = 1) -> None:
        self.open[point].release(times)

    def release(self) -> None:
        gates, self.open = self.open, {}
        for gate in gates.values():
            gate.release(1000)

    def __call__(self, point: str, data: Bytes | None) -> None:
        gate = self.open.get(point)
        if gate is not None:
            self.reached[point].release()
            assert gate.acquire(timeout=PATIENCE)
        if point in self.error:
            raise self.error[point]
        if data is not None and self.spoil is not None:
            self.spoil(data)


@dataclass
class Rig:
    folder: Path
    dtype: torch.dtype = torch.bfloat16
    step_blocks: int = 1000
    gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        shapes = [(PAGES, 2, 2, 4, 2, 40), (PAGES, 3, 2, 4, 2, 40)]
        self.storages = [torch.zeros(shape, dtype=self.dtype) for shape in shapes]
        for number, storage in enumerate(self.storages):
            raw = storage.view(torch.uint8)
            random = np.random.default_rng(number).integers(0, 256, raw.numel(), dtype=np.uint8)
            raw.copy_(torch.from_numpy(random).view(raw.shape))
        self.before = [self.raw(group).clone() for group in (0, 1)]
        self.pages = PoolPages(self.storages)
        self.host = HostStore(PAGES, self.pages.block_bytes)
        self.disk = DiskStore(self.folder, NAMESPACE, 4 << 20, self.pages.block_bytes, fault=self.gate)
        step = self.step_blocks * self.pages.block_bytes
        self.mover = Mover(self.pages, self.host, self.disk, WallClock(), step_bytes=step, fault=self.gate)
        self.blocks = chain(PAGES, groups=2)
        self.ids = 0

    def raw(self, group: int) -> torch.Tensor:
        return self.storages[group].view(torch.uint8)

    def wipe(self) -> None:
        for group in (0, 1):
            self.raw(group).fill_(255)

    def holds(self, numbers: range) -> bool:
        """Whether these pages have what they had at first."""
        at = list(numbers)
        return all(torch.equal(self.raw(group)[at], self.before[group][at]) for group in (0, 1))

    def submit(self, move: Move, blocks: list[Block] | None = None, urgent: bool = False) -> int:
        self.ids += 1
        chosen = self.blocks if blocks is None else blocks
        self.mover.submit(Transfer(self.ids, move, tuple(chosen), urgent))
        return self.ids

    def cancel(self, number: int) -> None:
        self.mover.change(Change(number, Word.CANCEL))

    def hurry(self, number: int) -> None:
        self.mover.change(Change(number, Word.HURRY))

    def wait(self, count: int = 1) -> list[TransferDone]:
        done: list[TransferDone] = []
        while len(done) < count:
            assert select.select([self.mover.fileno()], [], [], PATIENCE)[0], "nothing more ended"
            done += self.mover.poll()
        return done

    def move(self, move: Move, blocks: list[Block] | None = None) -> TransferDone:
        self.submit(move, blocks)
        (done,) = self.wait()
        return done

    def close(self) -> None:
        self.gate.release()
        assert self.mover.close(PATIENCE)
        self.disk.close()


def replace_block(block: Block, **changes: object) -> Block:
    fields = {name: getattr(block, name) for name in block.__struct_fields__}
    return Block(**(fields | changes))
