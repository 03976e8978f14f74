"""A worker whose model takes no time: what is left of a step is the engine's own cost.

Everything else is the real thing: process, socket, frames, loop, core. Its log-probability field
carries the pause between two runs of the executor, in seconds: that pause is the overhead.
"""

from __future__ import annotations

import os
import sys
import time

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


class IdleExecutor:
    """Returns tokens at once."""

    def __init__(self) -> None:
        self._ended = 0.0

    def run(self, plan: Plan) -> StepResult:
        began = time.perf_counter()
        pause = began - self._ended if self._ended else 0.0
        results = tuple(self._result(chunk, pause) for chunk in plan.chunks)
        self._ended = time.perf_counter()
        return StepResult(plan.step, results, self._ended - began)

    @staticmethod
    def _result(chunk: Chunk, pause: float) -> ChunkResult:
        sampled = None
        if chunk.sample is not None:
            sampled = Sampled((chunk.start * 7 + 1) % VOCABULARY, logprob=pause)
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
    return BuiltEngine(core, IdleExecutor(), hello, config, groups, pages, StepCost())


if __name__ == "__main__":
    sys.exit(main(build))
