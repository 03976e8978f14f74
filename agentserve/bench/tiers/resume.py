"""What a session's return costs after its KV was elsewhere: time to the first token, on the real engine.

One session of `context` tokens rests; a tool's result of `result` tokens, new each time, brings it
back. Every round tries all the places where its KV can have been meanwhile, in turning order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from agentserve.bench.report import Row
from agentserve.bench.tiers.cold import drop_from_memory, not_cold, read_so_far
from agentserve.bench.tiers.engine import Engine, Resumed
from agentserve.bench.tiers.findings import Findings, Limit, time_row
from agentserve.bench.tiers.steered import SteeredPolicy
from agentserve.executor.runner import TorchExecutor
from agentserve.server.workers.build_tiers import BuiltTiers, build_tiers
from agentserve.server.workers.sizes import tier_sizes
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.types import SessionId
from tiering.policy.base import Choice
from tiering.stores.disk import block_footprint
from tiering.stores.environment import worker_folder
from tiering.stores.host import slot_bytes

SESSION = SessionId("rests")
NEVER = "KV never left the device"
HIDDEN = "in the host, restored before the result came"
HOST = "in the host, loaded on demand"
WARM = "on disk, in the system's memory"
COLD = "on disk, cold"
RECOMPUTE = "nowhere: computed again"
IN_MEMORY = (NEVER, HIDDEN, HOST, RECOMPUTE)
ON_DISK = (COLD, WARM)
TIMES_FASTER = 30.0
REST = 0.1  # seconds


@dataclass(frozen=True)
class Plan:
    context: int = 4096  # tokens
    result: int = 32
    rounds: int = 5


def blocks_of(plan: Plan, page_size: int) -> int:
    """Blocks that hold the session with a result and its answer."""
    return -(-(plan.context + plan.result + 1) // page_size)


def pool_blocks(plan: Plan, page_size: int) -> int:
    """Device pages for it: a load pins at most half of a pool, a save less than a quarter at a time."""
    return 4 * blocks_of(plan, page_size)


class Resumes:
    """The trials of one run; `folder` is where KV on disk lies."""

    def __init__(self, built: BuiltEngine, spec: WorkerSpec, folder: Path, plan: Plan) -> None:
        assert isinstance(built.executor, TorchExecutor)
        self._built = built
        self._executor = built.executor
        self._plan = plan
        self._block = sum(group.page_bytes for group in built.groups)
        size = spec.page_size
        blocks = blocks_of(plan, size)
        host = 2 * blocks * slot_bytes(self._block)
        self._in_memory = msgspec.structs.replace(spec, host_kv=host, disk_kv=0)
        disk = 3 * blocks * block_footprint(self._block, size) + (16 << 20)
        self._on_disk = msgspec.structs.replace(spec, host_kv=host, disk_kv=disk, data_dir=str(folder))
        self._file = worker_folder(folder, spec.index) / "data.mdb"
        self._full = plan.context // size
        self._draw = np.random.default_rng(0)
        self._base = self._tokens(plan.context)
        self.seconds: dict[str, list[float]] = {}
        self.cold_load: list[float] = []  # seconds of the transfer alone
        self.reasons: list[str] = []  # why cold was not cold

    def _tokens(self, count: int) -> list[int]:
        top = min(self._built.hello.vocab_size, 40_000)
        return self._draw.integers(100, top, count).tolist()  # type: ignore[no-any-return]

    def run(self, progress: Callable[[str], None]) -> None:
        """All rounds. RuntimeError if KV was not where it should have been."""
        rounds = self._plan.rounds
        progress(f"resumes: the session of {self._plan.context:,} tokens is computed and written to disk")
        self._write_out()
        with self._engine(self._in_memory) as (engine, policy):
            engine.first_token(SESSION, self._base)
            engine.park(SESSION)
            for number in range(rounds):
                progress(f"resumes: round {number + 1} of {rounds}")
                for place in _turned(IN_MEMORY, number):
                    self._note(place, self._from_memory(engine, policy, place))
                # The pool is about to be somebody else's: what is worth keeping is in the host.
                self._place(engine, policy, Choice.HOST)
                engine.core.kv.evict_all()
                for place in _turned(ON_DISK, number):
                    self._note(place, self._from_disk(place == COLD))

    def _note(self, place: str, found: Resumed) -> None:
        self.seconds.setdefault(place, []).append(found.seconds)
        least = 0 if place == RECOMPUTE else self._plan.context
        if found.cached < least or (place == RECOMPUTE and found.cached):
            raise RuntimeError(f"resume ({place}): {found.cached} prompt tokens had KV, not {least}")

    # --- in memory ---------------------------------------------------------------------------

    def _from_memory(self, engine: Engine, policy: SteeredPolicy, place: str) -> Resumed:
        if place == RECOMPUTE:  # of tokens that nobody has seen: the same work, and the session stays
            return engine.first_token(SessionId("new"), self._tokens(len(self._base) + self._plan.result))
        if place in (HIDDEN, HOST):
            self._place(engine, policy, Choice.HOST)
            engine.core.kv.evict_all()
            self._expect(engine, device=0)
        if place in (HIDDEN, NEVER):
            self._place(engine, policy, Choice.RESTORE)
            self._expect(engine, device=self._full)
        # The tool goes on for a moment, in all places alike: what just moved has left the caches and the
        # kernel's threads sleep, as they do when a result comes.
        time.sleep(REST)
        found = engine.first_token(SESSION, self._base + self._tokens(self._plan.result))
        policy.choice = Choice.HOLD
        engine.park(SESSION)
        engine.settle()
        return found

    @staticmethod
    def _place(engine: Engine, policy: SteeredPolicy, choice: Choice) -> None:
        policy.choice = choice
        engine.ask_policy(SESSION)

    def _expect(self, engine: Engine, device: int) -> None:
        """All of its context is somewhere, `device` blocks of it (or more) on the device."""
        where = engine.view(SESSION).residency
        assert where is not None
        on_device = where.device >= device if device else not where.device
        if not on_device or where.device + where.host + where.disk < self._full:
            raise RuntimeError(f"KV is not where it should be: {where}, {device} blocks wanted on the device")

    # --- on disk -----------------------------------------------------------------------------

    def _write_out(self) -> None:
        with self._engine(self._on_disk) as (engine, policy):
            engine.first_token(SESSION, self._base)
            engine.park(SESSION)
            self._place(engine, policy, Choice.DISK)
            view = engine.tiers()
            if view is None or view.disk < self._full or view.disk_error:
                raise RuntimeError("KV could not be written to disk")

    def _from_disk(self, cold: bool) -> Resumed:
        """In a worker that has just started on the folder: nothing is in the host or on the device."""
        if cold:
            self.reasons.append(drop_from_memory(self._file))
        before = read_so_far()
        with self._engine(self._on_disk) as (engine, _):
            found = engine.first_token(SESSION, self._base + self._tokens(self._plan.result))
            if cold:
                self.reasons.append(not_cold(before, read_so_far(), self._full * self._block))
                view = engine.tiers()
                assert view is not None
                self.cold_load.append(view.moved["fetch"][1])
        return found

    @contextmanager
    def _engine(self, spec: WorkerSpec) -> Iterator[tuple[Engine, SteeredPolicy]]:
        """With tiers as `spec` says, a core that knows nobody, and all of the pool."""
        policy = SteeredPolicy()
        engine = Engine(self._built, self._executor, self._tiers(spec), policy)
        try:
            yield engine, policy
        finally:
            engine.close()

    def _tiers(self, spec: WorkerSpec) -> BuiltTiers:
        sizes = tier_sizes(spec, self._built.groups, None)
        assert sizes is not None
        return build_tiers(spec, sizes, self._executor.pool, bytes.fromhex(self._built.hello.namespace))


def _turned(places: tuple[str, ...], by: int) -> tuple[str, ...]:
    by %= len(places)
    return places[by:] + places[:by]


# --- what it comes to --------------------------------------------------------------------------


def measure(
    built: BuiltEngine, spec: WorkerSpec, folder: Path, plan: Plan, progress: Callable[[str], None]
) -> Findings:
    """Rows of times to the first token, and how they compare. RuntimeError, ValueError or OSError."""
    trials = Resumes(built, spec, folder, plan)
    trials.run(progress)
    seconds, found = trials.seconds, Findings()
    never = Limit.of(seconds[NEVER], "never left")
    asked = {HIDDEN: "90 % of never left"}
    for place in (NEVER, HIDDEN, HOST, WARM, COLD, RECOMPUTE):
        limit = None if place == NEVER else never
        found.rows.append(time_row("resume", f"resume: {place}", seconds[place], limit, asked.get(place, "")))
    again = statistics.median(seconds[RECOMPUTE])
    faster = [again / each for each in seconds[COLD]]
    alone = [again / each for each in trials.cold_load]
    aim = Limit(TIMES_FASTER, "asked")
    for name, runs in (
        ("cold resume, first token: times faster than computing again", faster),
        ("cold load alone: times faster than computing again", alone),
    ):
        row = Row(name, statistics.median(runs), "x", aim.value, aim.name, True, tuple(runs), "resume")
        found.rows.append(msgspec.structs.replace(row, asked=f"{TIMES_FASTER:.0f} x"))
    why_not_cold = next(filter(None, trials.reasons), "")
    if why_not_cold:
        found.skipped["cold resume"] = why_not_cold
        found.rows = [row for row in found.rows if COLD not in row.name and "cold" not in row.name]
    found.notes.append(
        f"resumes: {plan.context:,} tokens and a result of {plan.result}, medians of {plan.rounds} rounds; "
        "after a restart where KV is on disk"
    )
    return found
