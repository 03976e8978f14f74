"""What tiers cost while nothing waits: the same decode steps with and without them, in alternation.

Two cores share one executor and one pool; each decodes its own sessions, a stretch of steps at a time
(with, without, without, with). What lies in the pool's pages means nothing here, so the sessions are
brought to their length without running the model, and both cores may use every page.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from agentserve.bench.report import Row
from agentserve.bench.tiers.engine import PATIENCE, Engine
from agentserve.bench.tiers.findings import Findings, Limit
from agentserve.core.plan import ChunkResult, Plan, Sampled, StepResult
from agentserve.core.ports import Executor
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import TorchExecutor
from agentserve.server.workers.build_tiers import build_tiers
from agentserve.server.workers.sizes import tier_sizes
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.types import SessionId

ASKED = 1.02  # times a step without tiers
HOST_KV, DISK_KV = 256 << 20, 256 << 20
REST_TOKENS = 256  # of a session at rest
FILLED = 64  # pages of random numbers that all others repeat
LEFT_OUT = 2  # first steps of a stretch: the other core's work is still in the caches


@dataclass(frozen=True)
class Load:
    rows: int  # sessions that decode
    context: int  # tokens of each
    resting: int = 0  # sessions at rest, waiting for a tool

    @property
    def name(self) -> str:
        rest = f", {self.resting} at rest" if self.resting else ""
        return f"decode, {self.rows} x {self.context} tokens{rest}"

    def blocks(self, page_size: int, steps: int) -> int:
        each = -(-(self.context + steps) // page_size) + 1
        return self.rows * each + self.resting * (REST_TOKENS // page_size + 1)


LOADS = (
    *(Load(rows, context) for context in (64, 2000) for rows in (1, 8, 32)),
    Load(8, 2000, resting=200),
)


@dataclass(frozen=True)
class Plans:
    loads: tuple[Load, ...] = LOADS
    seconds: float = 6.0  # of measured steps per load, both cores together
    stretches: int = 8  # per core
    most_steps: int = 60  # per stretch


class Measured:
    """An executor that notes what each step took; while `skips`, it runs nothing and says that it has."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.skips = False
        self.plan: Plan | None = None  # the last one
        self.seconds = 0.0  # that it took

    def run(self, plan: Plan) -> StepResult:
        self.plan = plan
        began = time.perf_counter()
        if self.skips:
            results = tuple(
                ChunkResult(
                    chunk.session, chunk.turn, chunk.epoch, len(chunk.tokens),
                    Sampled(7) if chunk.sample is not None else None,
                )
                for chunk in plan.chunks
            )  # fmt: skip
            return StepResult(plan.step, results, 0.0)  # seconds that nobody learns from
        result = self._inner.run(plan)
        self.seconds = time.perf_counter() - began
        return result

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        self._inner.define_grammar(grammar_id, compiled)

    def drop_grammar(self, grammar_id: str) -> None:
        self._inner.drop_grammar(grammar_id)


@dataclass
class Steps:
    """Of every stretch, the median seconds of a decode step: all of it, and what of it is outside the
    executor."""

    whole: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)


class Decoding:
    """One core with the sessions of a load. `name`: both cores' sessions have names of their own."""

    def __init__(self, name: str, engine: Engine, executor: Measured, load: Load) -> None:
        self._name = name
        self._engine = engine
        self._executor = executor
        self._load = load
        self.steps = Steps()

    @property
    def decisions(self) -> int:
        """That the policy has taken so far."""
        view = self._engine.tiers()
        return sum(view.decisions.values()) if view is not None else 0

    def begin(self, longest: int) -> None:
        """Bring all sessions to their length; those that rest have been parked and settled."""
        self._executor.skips = True
        for number in range(self._load.resting):
            session = SessionId(f"{self._name}-rests-{number}")
            self._engine.submit(session, _prompt(1000 + number, REST_TOKENS), 1)
            self._engine.settle()
            self._engine.park(session)
        self._engine.settle()
        for number in range(self._load.rows):
            prompt = _prompt(number, self._load.context)
            self._engine.submit(
                SessionId(f"{self._name}-decodes-{number}"), prompt, longest - self._load.context
            )
        deadline = time.perf_counter() + PATIENCE
        self._executor.plan = None
        while not self._all_decode():
            self._engine.turn()
            self._engine.read()
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{self._load.name}: not all sessions came to decode")
        self._executor.skips = False

    def _all_decode(self) -> bool:
        plan = self._executor.plan
        return plan is not None and len(plan.chunks) == plan.tokens == self._load.rows

    def stretch(self, count: int) -> float:
        """`count` steps, noted; the median of their seconds."""
        whole, outside = [], []
        for number in range(count + LEFT_OUT):
            self._executor.plan = None
            seconds = self._engine.turn()
            self._engine.read()
            if not self._all_decode():
                raise RuntimeError(f"{self._load.name}: a step was not of these sessions alone")
            if number >= LEFT_OUT:
                whole.append(seconds)
                outside.append(seconds - self._executor.seconds)
        self.steps.whole.append(statistics.median(whole))
        self.steps.outside.append(statistics.median(outside))
        return self.steps.whole[-1]


def _prompt(number: int, length: int) -> list[int]:
    return [(number * 7919 + position * 31) % 40_000 + 100 for position in range(length)]


def fill(pool: KVPool) -> None:
    """Numbers like KV in every page: memory that was never written reads faster than it should."""
    torch.manual_seed(0)
    for storage in pool.storages:
        filled = min(FILLED, storage.shape[0])
        storage[:filled].normal_()
        for start in range(filled, storage.shape[0], filled):
            end = min(start + filled, storage.shape[0])
            storage[start:end] = storage[: end - start]


def measure(
    built: BuiltEngine, spec: WorkerSpec, folder: Path, plans: Plans, progress: Callable[[str], None]
) -> Findings:
    """Rows: the ratio of step times, and what a step takes outside the executor, both ways."""
    assert isinstance(built.executor, TorchExecutor)
    fill(built.executor.pool)
    found = Findings()
    for load in plans.loads:
        progress(load.name)
        with _both(built, spec, folder, load) as (tiered, plain):
            decisions = _alternate(tiered, plain, built, load, plans)
        found.rows += _rows(load, tiered.steps, plain.steps)
        if decisions:
            found.notes.append(f"{load.name}: {decisions} decisions about sessions at rest meanwhile")
    found.notes.append(
        f"steps: host and disk tier and the {spec.tier_policy} policy beside none, in stretches "
        "with-without-without-with, compared pair by pair; outside the model: loop, core, exchange, frames"
    )
    return found


@contextmanager
def _both(
    built: BuiltEngine, spec: WorkerSpec, folder: Path, load: Load
) -> Iterator[tuple[Decoding, Decoding]]:
    assert isinstance(built.executor, TorchExecutor)
    executor = Measured(built.executor)
    spec = msgspec.structs.replace(spec, host_kv=HOST_KV, disk_kv=DISK_KV, data_dir=str(folder))
    sizes = tier_sizes(spec, built.groups, None)
    assert sizes is not None
    tiers = build_tiers(spec, sizes, built.executor.pool, bytes.fromhex(built.hello.namespace))
    engines = [Engine(built, executor, tiers), Engine(built, executor)]
    try:
        yield Decoding("a", engines[0], executor, load), Decoding("b", engines[1], executor, load)
    finally:
        for engine in engines:
            engine.close()


def _alternate(tiered: Decoding, plain: Decoding, built: BuiltEngine, load: Load, plans: Plans) -> int:
    """Returns how many decisions the policy took during the steps."""
    longest = built.hello.max_model_len
    tiered.begin(longest)
    plain.begin(longest)
    step = max(each.stretch(LEFT_OUT) for each in (tiered, plain))
    tiered.steps, plain.steps = Steps(), Steps()
    count = min(plans.most_steps, max(2, round(plans.seconds / (2 * plans.stretches) / step)))
    before = tiered.decisions
    for number in range(plans.stretches):
        order = (tiered, plain) if number % 2 == 0 else (plain, tiered)
        for each in order:
            each.stretch(count)
    return tiered.decisions - before


def _rows(load: Load, tiered: Steps, plain: Steps) -> list[Row]:
    """Stretches are compared in the order in which they ran."""
    ratios = [one / other for one, other in zip(tiered.whole, plain.whole, strict=True)]
    outside, without = ([1e6 * each for each in steps.outside] for steps in (tiered, plain))
    step = 1e6 * statistics.median(plain.whole)
    added = [100 * (one - other) / step for one, other in zip(outside, without, strict=True)]
    asked = Limit(ASKED, "asked")
    rows: tuple[tuple[str, list[float], str, Limit | None, str], ...] = (
        ("step with tiers / without", ratios, "x", asked, f"at most {ASKED:.2f} x"),
        ("outside the model, with tiers", outside, "us/step", Limit.of(without, "without"), ""),
        ("what tiers add to that", added, "% of a step", None, "at most 2 %"),
    )
    return [
        Row(
            f"{load.name}: {name}", statistics.median(runs), unit,
            beside.value if beside else None, beside.name if beside else "", False,
            tuple(runs), "steps", asked=words,
        )
        for name, runs, unit, beside, words in rows
    ]  # fmt: skip
