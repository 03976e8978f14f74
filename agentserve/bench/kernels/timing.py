"""Repeating and timing: variants in turn, and the machine's own rates between their runs.

Machines drift: other tenants take memory bandwidth, clocks change. So a row's limit comes from rates
that were measured in between its own runs, and variants that are compared run in alternation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentserve.bench.kernels.costs import Demand
from agentserve.bench.report import Row

Clock = Callable[[], float]
Run = Callable[[], float]
"""Does its work once and returns the seconds that count."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does per second: bytes read, operations in the step's dtype and in int8."""

    read: float
    float_ops: float
    int8_ops: float

    def seconds(self, demand: Demand) -> tuple[float, str]:
        """The least time that `demand` can take, and what sets it. Integer and other operations share
        the arithmetic units, so they add up."""
        memory = demand.nbytes / self.read
        compute = demand.float_ops / self.float_ops + demand.int8_ops / self.int8_ops
        return (memory, "memory") if memory >= compute else (compute, "products")


class Gauge(Protocol):
    """Measures the machine."""

    def rates(self) -> Rates:
        """As they are now; takes some milliseconds."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """How often a row is run: at least `runs` times, more while it has taken less than `seconds`.

    After `total` seconds of the whole benchmark every further row runs once, after `stop` seconds none.
    """

    runs: int = 3
    most: int = 25
    seconds: float = 0.25
    total: float = 130.0
    stop: float = 165.0


@dataclass(frozen=True, slots=True)
class Timed:
    """One variant's runs, and the rates between them."""

    seconds: tuple[float, ...]
    rates: tuple[Rates, ...]

    def row(self, group: str, name: str, demand: Demand, variant: str = "") -> Row:
        """In milliseconds. The limit is the median of those that the rates around each run set."""
        limits = [rates.seconds(demand) for rates in self.rates]
        middle = statistics.median_low(limits)
        return Row(
            name=name,
            value=statistics.median(self.seconds) * 1e3,
            unit="ms",
            limit=middle[0] * 1e3,
            limit_name=middle[1],
            runs=tuple(seconds * 1e3 for seconds in self.seconds),
            group=group,
            variant=variant,
        )

    def rate_row(self, group: str, name: str, demand: Demand, tokens: int, variant: str = "") -> Row:
        """As `row`, in tokens per second."""
        row = self.row(group, name, demand)
        assert row.limit is not None
        return Row(
            name=name,
            value=tokens * 1e3 / row.value,
            unit="tokens/s",
            limit=tokens * 1e3 / row.limit,
            limit_name=row.limit_name,
            higher_is_better=True,
            runs=tuple(tokens / seconds for seconds in self.seconds),
            group=group,
            variant=variant,
        )

    def row_beside(self, group: str, name: str, limit: Timed, limit_name: str) -> Row:
        """As `row`; the limit is what was run in alternation."""
        runs = tuple(seconds * 1e3 for seconds in self.seconds)
        least = statistics.median(limit.seconds) * 1e3
        return Row(name, statistics.median(runs), "ms", least, limit_name, runs=runs, group=group)


@dataclass
class Stopwatch:
    """Runs things under one budget. Keeps every rate that it saw."""

    gauge: Gauge
    effort: Effort
    clock: Clock = time.perf_counter
    seen: list[Rates] = field(default_factory=list)
    hurried: int = 0  # figures of fewer runs than wanted because the time was up

    def __post_init__(self) -> None:
        self._began = self.clock()

    def alternate(self, variants: Mapping[str, Run], warm: bool = True) -> dict[str, Timed]:
        """Time each variant; every round runs all, in turning order. `warm`: once before, uncounted."""
        names = list(variants)
        if warm and not self._late:
            for run in variants.values():
                run()
        found: dict[str, list[float]] = {name: [] for name in names}
        rates: list[Rates] = []
        began = self.clock()
        while not self._enough(len(rates), self.clock() - began):
            rates.append(self.gauge.rates())
            for name in names if len(rates) % 2 else reversed(names):
                found[name].append(variants[name]())
        self.seen += rates
        self.hurried += len(names) if len(rates) < self.effort.runs else 0
        return {name: Timed(tuple(runs), tuple(rates)) for name, runs in found.items()}

    @property
    def elapsed(self) -> float:
        """Seconds since this watch was made."""
        return self.clock() - self._began

    def alone(self, run: Run, warm: bool = True) -> Timed:
        return self.alternate({"": run}, warm)[""]

    @property
    def over(self) -> bool:
        """Whether nothing more should begin."""
        return self.elapsed > self.effort.stop

    @property
    def _late(self) -> bool:
        return self.elapsed > self.effort.total

    def _enough(self, rounds: int, spent: float) -> bool:
        if self._late and rounds:
            return True
        return rounds >= self.effort.most or (rounds >= self.effort.runs and spent >= self.effort.seconds)


def timed(work: Callable[[], object], clock: Clock = time.perf_counter) -> Run:
    """`work` as a run: all of its time counts."""

    def run() -> float:
        began = clock()
        work()
        return clock() - began

    return run


def each(works: Sequence[Callable[[], object]], clock: Clock = time.perf_counter) -> Run:
    """Runs all of `works`; what counts is the mean time of one."""

    def run() -> float:
        began = clock()
        for work in works:
            work()
        return (clock() - began) / len(works)

    return run
