"""`python -m agentserve.bench.compare.ours`: our engine core and executor behind `drivers/loop.py`'s lines.

The orders hold `flags`, settings as `agentserve serve` takes them (names without dashes).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from agentserve import __version__
from agentserve.bench.compare.drivers.loop import Prompts, serve
from agentserve.config import load
from agentserve.machine import usable_cores
from agentserve.messages import Close, ResetPrefixCache, Submit, pack_tokens
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.spec import worker_spec
from agentserve.types import Sampling, SessionId, TurnId

OF_THE_PROCESS = ("protocol", "pid", "weights_digest")  # parts of Hello that say nothing of speed


class Ours:
    """One engine; its prefix cache is emptied before every run."""

    def __init__(self, orders: dict[str, Any]) -> None:
        spec = worker_spec(load(orders["flags"]), 0, "", os.getpid(), usable_cores())
        self._built = build_engine(spec)
        hello = msgspec.structs.asdict(self._built.hello)
        self.version = __version__
        self.settings = {
            "model": spec.model,
            "threads": spec.threads,
            "max_batched_tokens": spec.max_batched_tokens,
            **{name: value for name, value in hello.items() if name not in OF_THE_PROCESS},
        }

    def prefill(self, prompts: Prompts) -> float:
        core = self._built.core
        began = time.perf_counter()
        names = self._submit(prompts, 1)
        while core.has_work:
            self._step()
        seconds = time.perf_counter() - began
        self._close(names)
        return seconds

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        # The first prompts are decoding while the last are prefilled; a step that is mixed is not timed.
        spare = sum(map(len, prompts))
        names = self._submit(prompts, steps + spare)
        seconds: list[float] = []
        while len(seconds) < steps:
            chunks, tokens, duration = self._step()
            if chunks == tokens == len(prompts):
                seconds.append(duration)
        self._close(names)
        return seconds

    def _submit(self, prompts: Prompts, tokens: int) -> list[SessionId]:
        core = self._built.core
        core.handle(ResetPrefixCache(0), 0.0)
        names = [SessionId(f"compare-{number}") for number in range(len(prompts))]
        room = self._built.hello.max_model_len - max(map(len, prompts))
        sampling = Sampling(temperature=0.0, max_tokens=min(tokens, room), ignore_eos=True)
        for name, prompt in zip(names, prompts, strict=True):
            core.handle(Submit(name, TurnId(1), pack_tokens(array("i", prompt)), sampling), 0.0)
        return names

    def _step(self) -> tuple[int, int, float]:
        """One step: its chunks, its tokens, its seconds, bookkeeping of the core included."""
        began = time.perf_counter()
        plan = self._built.core.begin_step(began)
        if plan is None:
            raise RuntimeError("the KV pool is too small for this scenario")
        self._built.core.finish_step(self._built.executor.run(plan), time.perf_counter())
        return len(plan.chunks), plan.tokens, time.perf_counter() - began

    def _close(self, names: Sequence[SessionId]) -> None:
        for name in names:
            self._built.core.handle(Close(name), 0.0)
        self._built.core.take_events()


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    sys.exit(serve(Ours))
