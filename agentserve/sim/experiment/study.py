"""The experiment's body: knees, a sweep of rates, a sweep of concurrency, and the knee's cause.

It knows no machine: a `Stage` plays each cell, imagined or real. What was done before is taken from the
store. For each trace all entrants face the same sessions at the same rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from agentserve.core.scheduling.relegation import EVERY
from agentserve.sim.experiment.cause import evidence
from agentserve.sim.experiment.cells import Cell, CellResult, CellStore, digest_of
from agentserve.sim.experiment.clients import Load, Promises
from agentserve.sim.experiment.engines import Entrant
from agentserve.sim.experiment.fairness import (
    fairness,
    largest_work,
    late_entries,
    longest_overtaking,
    longest_wait,
)
from agentserve.sim.experiment.knee import ATTAINED, PRECISION, Knee, find_knee
from agentserve.sim.experiment.metrics import Figures, figures
from agentserve.sim.experiment.record import RequestRecord
from agentserve.sim.experiment.run import Enough, Recorded
from agentserve.sim.experiment.script import Trace
from agentserve.sim.experiment.stage import Stage

COARSE = 0.1  # precision of the knees by which a step's size is chosen
BEYOND = 1.25  # knees at which the cause is read
MOVED = 0.05  # of a knee: twice what it is known to

Say = Callable[[str, CellResult], None]
"""Told of each cell that was run or found, with what it was run for."""


class Plan(msgspec.Struct, frozen=True):
    """What is done for each trace. Rates are in multiples of the best entrant's knee, if knees are looked
    for; else in sessions per second."""

    guess: float = 1.0  # sessions per second from which knees are looked for
    knees: bool = True
    rates: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.5)
    caps: tuple[int, ...] = ()  # requests at the server at once
    cap_rate: float = 1.0  # the rate that these run at, like `rates`
    steps: tuple[int, ...] = ()  # tokens per step, of which each entrant gets its best by its knee
    patience: float | None = None
    attempts: int = 1  # of each cell of the sweeps
    precision: float = PRECISION  # of knees


class Stand(msgspec.Struct, frozen=True):
    """One entrant on one trace."""

    entrant: Entrant
    knee: Knee | None
    sweep: tuple[CellResult, ...]
    capped: tuple[CellResult, ...]

    @property
    def goodput(self) -> float:
        """The best of the sweep."""
        return max((result.figures.goodput for result in self.sweep), default=0.0)


class TraceStudy(msgspec.Struct, frozen=True):
    trace: str
    digest: str
    sessions: int
    requests: int
    scale: float
    weights: dict[str, float]
    stands: tuple[Stand, ...]


class Intervention(msgspec.Struct, frozen=True):
    """The knee with a quarter more of one resource."""

    more_of: str
    knee: float
    moved: float  # of the knee without it

    @property
    def counts(self) -> bool:
        return self.moved > MOVED


class KneeCause(msgspec.Struct, frozen=True):
    """What the knee's run says of its cause, and what giving more says."""

    entrant: str
    trace: str
    rate: float  # beyond the knee, where whatever is short binds for certain
    said: str
    at: CellResult
    interventions: tuple[Intervention, ...]

    @property
    def confirmed(self) -> bool:
        """More of what was blamed moves the knee, and more of anything else not half as far. (Not at all is
        more than can be asked: a faster device frees pages earlier, a larger pool saves copies.)"""
        blamed = [each for each in self.interventions if each.more_of == self.said]
        others = [each.moved for each in self.interventions if each.more_of != self.said]
        return any(each.counts and each.moved >= 2 * max(others, default=0.0) for each in blamed)


class Study:
    """Runs cells on a stage and keeps them. promises, slo: what requests are promised, and its name."""

    def __init__(
        self, stage: Stage, store: CellStore, promises: Promises, slo: str, say: Say = lambda what, cell: None
    ) -> None:
        self.stage = stage
        self._store = store
        self._promises = promises
        self._slo = slo
        self._say = say

    def trace(self, trace: Trace, entrants: Sequence[Entrant], plan: Plan) -> TraceStudy:
        """All of a plan, for one trace."""
        chosen, knees, near = [], [], plan
        for each in entrants:
            entrant, near = self._best_step(trace, each, near)
            chosen.append(entrant)
            knees.append(self.knee(trace, entrant, near) if plan.knees else None)
        best = max((knee.rate for knee in knees if knee is not None), default=0.0)
        unit = best if best else 1.0
        stands = []
        for entrant, knee in zip(chosen, knees, strict=True):
            sweep = [
                self.cell(trace, entrant, Load(_rounded(unit * rate), None, plan.patience), attempt)
                for rate in plan.rates
                for attempt in range(plan.attempts)
            ]
            capped = [
                self.cell(trace, entrant, Load(_rounded(unit * plan.cap_rate), cap, plan.patience), attempt)
                for cap in plan.caps
                for attempt in range(plan.attempts)
            ]
            stands.append(Stand(entrant, knee, tuple(sweep), tuple(capped)))
        return TraceStudy(
            trace.name, trace.digest, len(trace.sessions), trace.requests, trace.scale, trace.weights,
            tuple(stands),
        )  # fmt: skip

    def knee(self, trace: Trace, entrant: Entrant, plan: Plan, precision: float | None = None) -> Knee:
        def attainment(rate: float) -> float:
            return self._attained(trace, entrant, rate, plan)

        return find_knee(attainment, plan.guess, precision=precision or plan.precision)

    def cell(self, trace: Trace, entrant: Entrant, load: Load, attempt: int = 0) -> CellResult:
        """A whole run, with its raw logs."""
        return self._cell(self._setting(trace, entrant, load, attempt), trace, entrant, load, "sweep")

    def cause(
        self, trace: Trace, entrant: Entrant, knee: Knee, plan: Plan, more: dict[str, Stage]
    ) -> KneeCause:
        """more: stages with a quarter more of one resource each, by the cause that it is a cure of."""
        rate = _rounded(knee.rate * BEYOND)
        at = self.cell(trace, entrant, Load(rate, None, plan.patience))
        near = msgspec.structs.replace(plan, guess=knee.rate)
        interventions = []
        for name, stage in more.items():
            study = Study(stage, self._store, self._promises, self._slo, self._say)
            moved = study.knee(trace, entrant, near).rate
            interventions.append(Intervention(name, moved, moved / knee.rate - 1.0))
        said = at.evidence.cause.value
        return KneeCause(entrant.name, trace.title, rate, said, at, tuple(interventions))

    # --- cells ---------------------------------------------------------------------------------

    def _best_step(self, trace: Trace, entrant: Entrant, plan: Plan) -> tuple[Entrant, Plan]:
        """The entrant with the step at which its knee is highest (the first of equals), and the plan with a
        guess near it. Of a step that is no good a little above the best knee so far nothing more is asked."""
        if not plan.steps or not plan.knees or entrant.tokens is not None:
            return entrant, plan
        best, rate = entrant, 0.0
        for tokens in plan.steps:
            one = msgspec.structs.replace(entrant, tokens=tokens)
            if rate and self._attained(trace, one, rate * (1 + MOVED), plan) < ATTAINED:
                continue
            near = msgspec.structs.replace(plan, guess=rate or plan.guess)
            found = self.knee(trace, one, near, COARSE).rate
            if found > rate or best is entrant:
                best, rate = one, found
        return best, msgspec.structs.replace(plan, guess=rate or plan.guess)

    def _attained(self, trace: Trace, entrant: Entrant, rate: float, plan: Plan) -> float:
        return self._probe(trace, entrant, Load(rate, None, plan.patience)).figures.attainment

    def _probe(self, trace: Trace, entrant: Entrant, load: Load) -> CellResult:
        """A run that ends when it is clear that too many have missed."""
        setting = msgspec.structs.replace(
            self._setting(trace, entrant, load, 0), until_missed=round(1.0 - ATTAINED, 6)
        )
        return self._cell(setting, trace, entrant, load, "knee")

    def _setting(self, trace: Trace, entrant: Entrant, load: Load, attempt: int) -> Cell:
        return Cell(
            identity=self.stage.identity(trace),
            machine=self.stage.digest,
            entrant=f"{entrant.name} {digest_of(entrant)}",
            rate=load.rate,
            cap=load.cap,
            patience=load.patience,
            slo=self._slo,
            attempt=attempt,
        )

    def _cell(self, setting: Cell, trace: Trace, entrant: Entrant, load: Load, why: str) -> CellResult:
        whole = setting.until_missed is None
        result = self._store.get(setting, logged=whole)
        if result is None:
            recorded = self.stage.play(entrant, trace, load, self._promises, _enough(setting.until_missed))
            result = summed_up(setting, trace, recorded)
            if whole:
                self._store.put(result, recorded.requests, recorded.iterations)
            else:
                self._store.put(result)
        self._say(f"{trace.title}, {entrant.name}, {why}", result)
        return result


def summed_up(setting: Cell, trace: Trace, recorded: Recorded) -> CellResult:
    """A run's figures. Of a run that was cut, attainment is what it could still have come to, at most."""
    counted = [each for each in recorded.requests if each.session in recorded.counted]
    total = figures(counted)
    if recorded.cut:
        total = msgspec.structs.replace(total, attainment=recorded.most_attained)
    return CellResult(
        cell=setting,
        figures=total,
        by_tenant={tenant: _of(counted, "tenant", tenant) for tenant in trace.weights},
        by_kind={kind: _of(counted, "kind", kind) for kind in sorted({each.kind for each in counted})},
        fairness=fairness(
            recorded.iterations,
            tuple(trace.weights),
            tuple(trace.weights.values()),
            largest_work(recorded.requests),
        ),
        evidence=evidence(recorded.requests, recorded.iterations, recorded.copying, recorded.stalled),
        longest_wait=longest_wait(recorded.requests, recorded.ended),
        longest_overtaking=longest_overtaking(recorded.requests),
        late_entries=late_entries(recorded.requests, EVERY),
        iterations=len(recorded.iterations),
        cut=recorded.cut,
    )


def _enough(until_missed: float | None) -> Enough:
    if until_missed is None:
        return lambda clients, now: False
    return lambda clients, now: clients.missed + clients.overdue(now) > until_missed * clients.total


def _of(requests: Sequence[RequestRecord], field: str, value: str) -> Figures:
    return figures([each for each in requests if getattr(each, field) == value])


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")
