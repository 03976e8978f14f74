"""Cores under pressure, two of them side by side: the one full, the other a neighbour that turns may go to.

What the API process does between them is done here by its own rules (`RunningTurn.continuation`), with worse
luck: questions come late, are asked of turns that run again, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from agentserve.core.cost import StepCost
from agentserve.core.scheduling.settings import DEFAULT_POLICY, SchedulingConfig
from agentserve.messages import Close, Displaced, Neighbour, Token, TurnEnded, Withdraw, Withdrawn
from agentserve.server.workers.running import RunningTurn
from agentserve.sim.mover import Faults
from agentserve.types import FinishReason
from tests.engines import TierRig, cold

COST = StepCost(fixed=0.01, per_row=0.0005, per_token=0.001, per_context=1e-5)
SHARED = list(range(24))
Asked = tuple[list[int], int, str, int]  # prompt, tokens to write, tenant, priority


@dataclass
class Load:
    """What is asked of the full one."""

    turns: list[Asked]
    pages: int
    host: int
    disk: int
    faults: Faults
    tokens: int  # of a step
    neighbour: bool
    earlier: bool  # their sessions had a turn before, whose KV lies where there is room for it
    policy: str = DEFAULT_POLICY

    @property
    def written(self) -> int:
        return sum(count for _, count, _, _ in self.turns)


def load_of(seed: int) -> Load:
    """A load that does not fit, by seed."""
    rng = Random(seed)
    turns = []
    for number in range(rng.randint(3, 7)):
        shared = SHARED[: rng.choice([0, 0, 12, 24])]
        prompt = [*shared, *(100 + number + rng.randint(0, 1) for _ in range(rng.randint(4, 40)))]
        turns.append((prompt, rng.randint(6, 40), rng.choice(["", "", "x"]), rng.choice([0, 0, 0, 1])))
    longest = max(len(prompt) + count for prompt, count, _, _ in turns)
    pages = longest // 4 + 4 + rng.randint(0, 12)
    bad = rng.random() < 0.3
    faults = Faults(
        seed=seed,
        bad=rng.choice([0.1, 1.0]) if bad else 0.0,
        late=rng.choice([0.0, 0.2]),
        slower=rng.choice([10.0, 1000.0]),
        cancelled=rng.choice([0.0, 0.1]),
    )
    host, disk = rng.choice([(0, 0), (8, 0), (64, 0), (8, 60), (64, 60)])
    return Load(turns, pages, host, disk, faults, rng.choice([8, 64]), rng.random() < 0.6, rng.random() < 0.5)


@dataclass
class Pair:
    load: Load
    seed: int
    full: TierRig = field(init=False)
    other: TierRig = field(init=False)
    told: dict[str, RunningTurn] = field(default_factory=dict)
    said: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, TurnEnded] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        load = self.load
        self.full = TierRig(
            (load.pages,), host=load.host, disk=load.disk, faults=load.faults, cost=COST,
            max_batched_tokens=load.tokens, max_num_seqs=6, scheduling=SchedulingConfig(policy=load.policy),
        )  # fmt: skip
        self.other = TierRig((120,), host=8, disk=20, peers=[self.full], cost=COST, max_num_seqs=6)
        self._rng = Random(self.seed)
        self._late: list[Displaced] = []
        self._read = {id(self.full): 0, id(self.other): 0}

    def run(self) -> None:
        """All turns to their ends, the second half of them submitted while the first run."""
        turns = [self._begin(number, turn) for number, turn in enumerate(self.load.turns)]
        self._read[id(self.full)] = len(self.full.events)
        while turns or self.full.core.has_work or self.other.core.has_work:
            while turns and (len(turns) > len(self.load.turns) // 2 or self._rng.random() < 0.3):
                self._submit(*turns.pop(0))
            self._route()
            ran = [self._step(rig) for rig in (self.full, self.other)]
            self._take(self.full)
            self._take(self.other)
            if not any(ran) and not turns:
                for rig in (self.full, self.other):
                    if rig.core.has_work and rig.mover.pending:
                        rig.wait()
            self.steps += 1
            assert self.steps < 200 * self.load.written, "it does not come to an end"

    def _begin(self, number: int, asked: Asked) -> tuple[str, Asked]:
        """A session, and its last turn's request."""
        prompt, name = asked[0], f"s{number}"
        if not self.load.earlier:
            return name, asked
        self.full.submit(name, prompt[:-3], max_tokens=1, tenant=asked[2])
        self.full.drain()
        self.full.settle()
        return name, asked

    def _submit(self, name: str, asked: Asked) -> None:
        prompt, count, tenant, priority = asked
        self.full.submit(name, prompt, max_tokens=count, tenant=tenant, priority=priority)
        self.told[name] = RunningTurn(self.full.submits[name], 0.0)
        self.said[name] = []

    @staticmethod
    def _step(rig: TierRig) -> bool:
        return rig.core.has_work and rig.step() is not None

    def _route(self) -> None:
        if self.load.neighbour:
            view = self.other.core.view()
            self.full.core.handle(Neighbour(view.pages - view.pages_live), self.full.now)
        asked, self._late = self._late, []
        for event in asked:
            luck = self._rng.random()
            if luck < 0.5:
                self.full.core.handle(Withdraw(event.session, event.turn), self.full.now)
            elif luck < 0.9:
                self._late.append(event)
        self._take(self.full)

    def _take(self, rig: TierRig) -> None:
        rig.events.extend(rig.core.take_events())
        for event in rig.events[self._read[id(rig)] :]:
            match event:
                case Displaced():
                    self._late.append(event)
                case Withdrawn(session=name, usage=usage) if usage is not None:
                    turn = self.told[name]
                    turn.slot = 0
                    turn.migrated(usage, 0.0)
                    back = self._rng.random() < 0.2  # there is no room any more, or that worker has died
                    goal = self.full if back else self.other
                    goal.core.handle(turn.continuation(), goal.now)
                case Token(session=name):
                    self.told[name].accept(event, 0.0)
                    self.said[name].append(event.token)
                    if rig is self.other and self.told[name].behind:
                        self.told[name].behind.clear()
                        self.full.core.handle(Close(name), self.full.now)
                case TurnEnded(session=name):
                    assert name not in self.ended
                    self.ended[name] = event
        self._read[id(rig)] = len(rig.events)

    def check(self) -> None:
        """Every turn said what it would have said alone, once."""
        for number, (prompt, count, _, _) in enumerate(self.load.turns):
            name = f"s{number}"
            assert self.said[name] == cold(prompt, count), name
            assert self.ended[name].reason is FinishReason.LENGTH
