"""`python -m agentserve.bench.compare.ours`: our engine core and executor behind `drivers/loop.py`'s lines.

The orders hold `flags`, settings as `agentserve serve` takes them (names without dashes).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import msgspec

from agentserve import __version__
from agentserve.bench.compare.drivers.loop import Prompts, serve
from agentserve.bench.drive import Drive
from agentserve.config import load
from agentserve.machine import usable_cores
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.spec import worker_spec

OF_THE_PROCESS = (
    "protocol",
    "pid",
    "weights_digest",
    "namespace",
)  # parts of Hello that say nothing of speed


class Ours:
    """One engine."""

    def __init__(self, orders: dict[str, Any]) -> None:
        spec = worker_spec(load(orders["flags"]), 0, "", os.getpid(), usable_cores())
        built = build_engine(spec)
        self._drive = Drive(built)
        hello = msgspec.structs.asdict(built.hello)
        self.version = __version__
        self.settings = {
            "model": spec.model,
            "threads": spec.threads,
            "max_batched_tokens": spec.max_batched_tokens,
            **{name: value for name, value in hello.items() if name not in OF_THE_PROCESS},
        }

    def prefill(self, prompts: Prompts) -> float:
        return self._drive.prefill(prompts)

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        return self._drive.decode(prompts, steps)


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    sys.exit(serve(Ours))
