"""A worker whose model takes no time: what is left of a step is the engine's own cost.

Everything else is the real thing: process, socket, frames, loop, core. Its log-probability field
carries the pause between two runs of the executor, in seconds: that pause is the overhead.

A model may be named that takes time, but none of this machine's: `device:SECONDS` is a device that computes
a step by itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.core.plan import Chunk, ChunkResult, Plan, Sampled, StepResult
from agentserve.messages import PROTOCOL_VERSION, Hello
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine, main
from agentserve.types import KVGroup

POOL_TOKENS = 1 << 19
VOCABULARY = 50_000
DEVICE = "device"


class IdleExecutor:
    """Returns tokens at once, or after `seconds` in which it does nothing."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._ended = 0.0
        self._computing: Callable[[], None] | None = None

    def when_computing(self, call: Callable[[], None]) -> None:
        self._computing = call

    def run(self, plan: Plan) -> StepResult:
        began = time.perf_counter()
        pause = began - self._ended if self._ended else 0.0
        if self._computing is not None:
            self._computing()
        if self._seconds:
            time.sleep(self._seconds)
        results = tuple(self._result(chunk, pause) for chunk in plan.chunks)
        self._ended = time.perf_counter()
        return StepResult(plan.step, results, self._ended - began)

    @staticmethod
    def _result(chunk: Chunk, pause: float) -> ChunkResult:
        sampled = None
        if chunk.sample is not None:
            sampled = Sampled((chunk.sample.length * 7 + 1) % VOCABULARY, logprob=pause)
        return ChunkResult(chunk.session, chunk.turn, chunk.epoch, len(chunk.tokens), sampled)

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        raise ValueError("an idle executor has no grammars")

    def drop_grammar(self, grammar_id: str) -> None:
        raise ValueError("an idle executor has no grammars")


def build(spec: WorkerSpec) -> BuiltEngine:
    size = spec.page_size
    pages = (POOL_TOKENS // size,)
    groups = (KVGroup("full", (0,), size),)
    config = CoreConfig(
        page_size=size,
        max_model_len=1 << 17,
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
    )
    core = EngineCore(config, groups, pages)
    kind, _, seconds = spec.model.partition(":")
    executor = IdleExecutor(float(seconds) if kind == DEVICE else 0.0)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        backend="none",
        backend_reason="none",
        device="none",
        dtype="none",
        weights="expanded",
        activations="float",
        kv_dtype="none",
        vocab_size=VOCABULARY,
        max_model_len=core.limit,
        page_size=size,
        pages=pages[0],
        kv_bytes=0,
        parameters=0,
        weight_bytes=0,
        weights_digest="",
        namespace="",
    )
    return BuiltEngine(
        core, executor, hello, config, groups, pages, StepCost(), when_computing=executor.when_computing
    )


if __name__ == "__main__":
    sys.exit(main(build))
