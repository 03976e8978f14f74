"""Running the same work again without saying it again: CUDA graphs behind a small port.

Work that is recorded reads and writes the same memory each time; what changes from step to step lies in
buffers that are filled before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Recorder(Protocol):
    """Records work. What is recorded may be run in any order, one after the other, on one stream."""

    @property
    def nbytes(self) -> int:
        """Device memory that was taken since this recorder was made, for what is recorded and its buffers."""
        ...

    def record(self, work: Work) -> Work:
        """Run `work` and return what does the same again. What `work` leaves behind it must write into
        memory that it did not allocate: what it allocates is scratch, shared by all that is recorded."""
        ...


class EagerRecorder:
    """Runs the work itself each time: for devices without graphs, and for tests."""

    @property
    def nbytes(self) -> int:
        return 0

    def record(self, work: Work) -> Work:
        work()
        return work


class GraphRecorder:
    """CUDA graphs that share one memory pool. The device must be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)

    @property
    def nbytes(self) -> int:
        return max(0, torch.cuda.memory_reserved(self._device) - self._before)

    def record(self, work: Work) -> Work:
        aside: torch.cuda.Stream = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            work()  # kernels are compiled and loaded here: neither may happen during a capture
        torch.cuda.current_stream(self._device).wait_stream(aside)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay
