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
ASKED = "0.3 ms"
ASKED_SIZE = (256, 2000)
PROMPT, REPLY, PAGE = 320, 160, 16  # tokens
ENDLESS = 4096  # a reply that does not end while it is measured
TENANTS = 50
BATCHES = 3
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
        pool = pages if load == "pages" else running * ENDLESS // PAGE + 2 * pages
        cost = StepCost(fixed=0.005, per_token=2e-5)
        self.core = EngineCore(config, (KVGroup("all", (0,), 1),), (pool,), cost)
        self.now = 0.0
        self._count = 0
        for _ in range(running):
            self.submit()
        for _ in range(running):
            self.step()  # until as many run as can
        for _ in range(waiting):
            self.submit()

    def submit(self) -> None:
        number = self._count
        self._count += 1
        reply = ENDLESS if self._endless else REPLY // 2 + number * 37 % REPLY
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
    """Of `BATCHES` times so many steps the batch with the least: others use the machine's caches, too."""
    rig = Rig(policy, load, running, waiting)
    for _ in range(0 if load == "decode" else REPLY):
        rig.step()  # until turns end all the time
    halves = [list(zip(*(rig.step() for _ in range(steps)), strict=True)) for _ in range(BATCHES)]
    begin, finish = (min(median(half[number]) for half in halves) for number in range(2))
    return Cost(begin, finish, len(rig.core.scheduler.running))


def measure(
    policies: Sequence[str],
    steps: int,
    told: Callable[[str], None],
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> list[Row]:
    """steps: of each batch, whose median counts. sizes: (turns that run, turns that wait), ascending."""
    rows: list[Row] = []
    for policy in policies:
        for load in LOADS:
            told(f"{policy}, {load}")
            rows += _rows(policy, load, {size: cost(policy, load, *size, steps) for size in sizes})
    return rows


def _rows(policy: str, load: str, costs: dict[tuple[int, int], Cost]) -> list[Row]:
    rows, group = [], f"{policy}, {load}"
    for size, found in costs.items():
        name, wanted = f"{size[0]} run, {size[1]} wait", size == ASKED_SIZE
        rows += [
            Row(f"{name}: plan", found.begin * 1e3, "ms", group=group, asked=ASKED if wanted else ""),
            Row(f"{name}: results", found.finish * 1e3, "ms", group=group),
        ]
    (small, first), *_, (large, last) = costs.items()
    exponent = math.log((last.begin + last.finish) / (first.begin + first.finish))
    exponent /= math.log(sum(large) / sum(small))
    rows.append(Row("grows with the number of turns to the power of", exponent, "", group=group))
    return rows
