"""A worker whose model says one token per turn at every tick; it writes down when.

Everything else is the real thing: process, socket, frames, loop, core. Arguments: a file of doubles, one
row a stream, one column a token (monotonic seconds); streams; tokens of each; seconds of a tick; the ids to
say. A turn's seed is the number of its stream.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from agentserve.bench.idle_worker import build as build_idle
from agentserve.core.plan import Chunk, ChunkResult, Plan, Sampled, StepResult
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine, main


class PacedExecutor:
    """Ends each step at the next tick."""

    def __init__(self, times: np.ndarray, tick: float, ids: tuple[int, ...]) -> None:
        self._times = times
        self._tick = tick
        self._ids = ids

    def run(self, plan: Plan) -> StepResult:
        began = time.monotonic()
        time.sleep(self._tick - began % self._tick)
        now = time.monotonic()
        results = tuple(self._result(chunk, now) for chunk in plan.chunks)
        return StepResult(plan.step, results, now - began)

    def _result(self, chunk: Chunk, now: float) -> ChunkResult:
        sampled = None
        spec = chunk.sample
        if spec is not None:
            index = spec.length - spec.prompt
            self._times[spec.sampling.seed, index] = now
            sampled = Sampled(self._ids[index % len(self._ids)])
        return ChunkResult(chunk.session, chunk.turn, chunk.epoch, len(chunk.tokens), sampled)

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        raise ValueError("a paced executor has no grammars")

    def drop_grammar(self, grammar_id: str) -> None:
        raise ValueError("a paced executor has no grammars")


def build(spec: WorkerSpec) -> BuiltEngine:
    path, streams, tokens, tick, *ids = sys.argv[1:]
    times = np.memmap(Path(path), np.float64, "r+", shape=(int(streams), int(tokens)))
    idle = build_idle(spec)
    executor = PacedExecutor(times, float(tick), tuple(map(int, ids)))
    return BuiltEngine(
        idle.core,
        executor,
        replace(idle.hello, backend="paced"),
        idle.config,
        idle.groups,
        idle.pages,
        idle.cost,
    )


if __name__ == "__main__":
    sys.exit(main(build))
