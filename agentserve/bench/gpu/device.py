"""The device that is measured, and its clock: a GPU, or the CPU that interprets in its stead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 1 << 30  # more than any cache of a GPU holds, and longer to write than a kernel to launch
WARM = 3  # runs that are not counted: compiling, clocks, caches


@dataclass(frozen=True, slots=True)
class Device:
    """Where it runs. `reduced`: an interpreter on a CPU, in which sizes are small and times mean nothing.
    `rehearsed`: what would be timed runs once, so that it is compiled; its times mean nothing either."""

    device: torch.device
    name: str
    reduced: bool
    rehearsed: bool = False

    def finish(self) -> None:
        """Wait for all work on it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], runs: int = 20, cold: bool = True) -> list[float]:
        """What `run` takes each time; `cold`: with nothing of its operands in the device's caches.

        On a GPU by events on the stream, so that the launch is not in it where the device has work.
        """
        if self.rehearsed or self.device.type != "cuda":
            return [_clocked(run) for _ in range(1 if self.reduced or self.rehearsed else runs)]
        for _ in range(WARM):
            run()
        flush = torch.empty(FLUSH_BYTES if cold else 1, dtype=torch.int8, device=self.device)
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # has no types
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(runs)]
        for began, ended in pairs:
            flush.zero_()  # also work in front, behind which the launch of what is timed is hidden
            began.record()
            run()
            ended.record()
        self.finish()
        return [began.elapsed_time(ended) / 1e3 for began, ended in pairs]


def find(interpreted: bool) -> Device:
    """The GPU; or the CPU, where kernels are interpreted. RuntimeError, one line, where there is no GPU."""
    if interpreted:
        return Device(torch.device("cpu"), "Triton's interpreter", True)
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device")
    return Device(torch.device("cuda"), torch.cuda.get_device_name(), False)


def _clocked(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
