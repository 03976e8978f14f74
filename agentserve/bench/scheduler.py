"""What a step costs in the core, by policy: CPU time of `begin_step` and `finish_step`, no model at all.

Each load has so many turns that run and so many that wait, in 50 tenants:

    decode   every seat is taken and every turn decodes: the step that is most frequent
    churn    the same, but turns end, others enter, and for each that ended a new one comes
    pages    the same, but it is pages that are short, not seats: so the line is looked at in every step
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from agentserve.bench.report import Row
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.core.plan import ChunkResult, Sampled, StepResult
from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.messages import Submit, TurnEnded, pack_tokens
from agentserve.types import KVGroup, Sampling, SessionId, TurnId

SIZES = ((64, 500), (256, 2000), (512, 4000))  # turns that run, turns that wait
LOADS = ("decode", "churn", "pages")
LIMIT_SECONDS = 0.0003
LIMIT_SIZE = (256, 2000)
PROMPT, REPLY, PAGE = 320, 160, 16  # tokens
TENANTS = 50
STEP_SECONDS = 0.01
TOKEN = 7  # every reply is made of it


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over steps, in seconds of CPU."""

    begin: float
    finish: float
    running: int  # in the last step


class Rig:
    """A core under load whose steps take no time."""

    def __init__(self, policy: str, load: str, running: int, waiting: int) -> None:
        self._endless = load == "decode"
        seats = running if load != "pages" else 2 * running
        pages = running * -(-(PROMPT + REPLY) // PAGE)
        config = CoreConfig(
            page_size=PAGE,
            max_model_len=1 << 20,
            max_num_seqs=seats,
            max_batched_tokens=8192,
            scheduling=SchedulingConfig(policy=policy),
        )
        pool = pages if load == "pages" else 4 * pages + (1 << 17)
        cost = StepCost(fixed=0.005, per_token=2e-5)
        self.core = EngineCore(config, (KVGroup("all", (0,), 1),), (pool,), cost)
        self.now = 0.0
        self._count = 0
        for _ in range(running):
            self.submit()
        while any(session.lag > 1 for session in self.core.scheduler.running) or self.core.scheduler.waiting:
            self.step()
        for _ in range(waiting):
            self.submit()

    def submit(self) -> None:
        number = self._count
        self._count += 1
        reply = 1 << 18 if self._endless else REPLY // 2 + number * 37 % REPLY
        tokens = array("i", [(number * 7919 + place * 31) % 50_000 for place in range(PROMPT)])
        sampling = Sampling(temperature=0.0, max_tokens=reply, ignore_eos=True)
        name, tenant = SessionId(f"s{number}"), f"tenant-{number % TENANTS}"
        self.core.handle(Submit(name, TurnId(1), pack_tokens(tokens), sampling, tenant=tenant), self.now)

    def step(self, clock: Callable[[], float] = time.thread_time) -> tuple[float, float]:
        """Seconds of CPU of its two halves."""
        began = clock()
        plan = self.core.begin_step(self.now)
        begin = clock() - began
        self.now += STEP_SECONDS
        if plan is None:
            raise RuntimeError("nothing to run, though turns wait")
        sampled = Sampled(TOKEN)
        chunks = tuple(
            ChunkResult(
                chunk.session, chunk.turn, chunk.epoch, len(chunk.tokens), sampled if chunk.sample else None
            )
            for chunk in plan.chunks
        )
        result = StepResult(plan.step, chunks, STEP_SECONDS)
        began = clock()
        self.core.finish_step(result, self.now)
        finish = clock() - began
        for event in self.core.take_events():
            if isinstance(event, TurnEnded):
                self.submit()
        return begin, finish


def cost(policy: str, load: str, running: int, waiting: int, steps: int) -> Cost:
    rig = Rig(policy, load, running, waiting)
    for _ in range(0 if load == "decode" else REPLY):
        rig.step()  # until turns end all the time
    taken = [rig.step() for _ in range(steps)]
    begin, finish = (median(half) for half in zip(*taken, strict=True))
    return Cost(begin, finish, len(rig.core.scheduler.running))


def measure(policies: Sequence[str], steps: int, told: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for policy in policies:
        for load in LOADS:
            told(f"{policy}, {load}")
            costs = {size: cost(policy, load, *size, steps) for size in SIZES}
            rows += _rows(policy, load, costs)
    return rows


def _rows(policy: str, load: str, costs: dict[tuple[int, int], Cost]) -> list[Row]:
    rows = []
    for size, found in costs.items():
        name = f"{policy}, {load}, {size[0]} + {size[1]}"
        limit = LIMIT_SECONDS * 1e3 if size == LIMIT_SIZE else None
        rows.append(Row(f"{name}: plan", found.begin * 1e3, "ms", limit, "0.3 ms" if limit else ""))
        rows.append(Row(f"{name}: results", found.finish * 1e3, "ms"))
    (small, first), *_, (large, last) = costs.items()
    ratio = math.log((last.begin + last.finish) / (first.begin + first.finish))
    exponent = ratio / math.log(sum(large) / sum(small))
    rows.append(Row(f"{policy}, {load}: growth, as power of the number of turns", exponent, ""))
    return rows
