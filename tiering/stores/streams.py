"""Queues of work on an accelerator, behind a small port: what is enqueued runs later, in order within its
queue, and one queue waits for another only where it is told to.

Tests have a stand-in that runs everything as late and in as bad an order as that allows.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import numpy as np
import torch

from tiering.stores.buffers import Bytes


class Queue(Enum):
    """Who enqueues there."""

    COMPUTE = "compute"  # kernels of steps: the worker's thread
    IN = "in"  # copies into pages: any of the mover's threads
    OUT = "out"  # copies out of pages: the same


class Mark(Protocol):
    """A point in a queue: all that was enqueued there before it was set."""

    @property
    def passed(self) -> bool:
        """Never waits. Raises what the device has to say if its work failed."""
        ...

    def wait(self) -> None:
        """Hold this thread until it is passed; raises as `passed` does."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """What passed between two marks of one queue, both passed."""
        ...


class Streams(Protocol):
    """One device's queues. Every method may be called on any thread; none but `host_memory` waits."""

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        """Enqueue what `work` does to tensors of the device, copies without waiting for them included."""
        ...

    def mark(self, queue: Queue) -> Mark: ...

    def follow(self, queue: Queue, mark: Mark) -> None:
        """What is enqueued in `queue` from now on runs when `mark` is passed."""
        ...

    def pinned(self, run: Bytes) -> bool:
        """Whether the device reads and writes these bytes by itself, whenever it comes to that."""
        ...

    def host_memory(self, rows: int, width: int) -> Bytes:
        """`[rows, width]` of such bytes. Takes its time."""
        ...


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # A thread that waits for it sleeps: others need the processor.
        self._event: torch.cuda.Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    @property
    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1000

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class CudaStreams:
    """Two streams beside the one that kernels are launched on, which is the device's default stream."""

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[Queue, torch.cuda.Stream] = {
            Queue.COMPUTE: torch.cuda.default_stream(device),
            Queue.IN: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            Queue.OUT: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        }

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._streams[queue]):
            work()

    def mark(self, queue: Queue) -> Mark:
        with torch.cuda.stream(self._streams[queue]):  # events are of the device that is current
            return _CudaMark(self._streams[queue])

    def follow(self, queue: Queue, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        mark.hold(self._streams[queue])

    def pinned(self, run: Bytes) -> bool:
        return run.flags.writeable and torch.from_numpy(run).is_pinned()

    def host_memory(self, rows: int, width: int) -> Bytes:
        made: Bytes = torch.empty((rows, width), dtype=torch.uint8, pin_memory=True).numpy()
        return made


def adjoining(first: Bytes, second: Bytes) -> bool:
    """Whether one run of bytes goes on where the other ends, in the same memory."""
    return first.base is second.base and address(first) + first.nbytes == address(second)


def address(run: Bytes) -> int:
    found: int = run.ctypes.data
    return found


def joined(runs: list[Bytes]) -> Bytes:
    """Runs that adjoin, as one."""
    if len(runs) == 1:
        return runs[0]
    return np.lib.stride_tricks.as_strided(runs[0], (sum(run.nbytes for run in runs),), (1,))
