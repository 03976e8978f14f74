"""Runs every scenario with every contestant, one after the other, never two at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from agentserve.bench.compare.plan import Scenario, turns
from agentserve.bench.compare.result import Facts, Figure, ScenarioRatios, scenario_ratios

SETTLE_SECONDS = 0.3  # threads of the one that ran last stop spinning, its last writes leave


class PeerFailed(Exception):
    """A contestant cannot go on; one line for the operator."""


class Contestant(Protocol):
    """One engine in a process of its own, ready to run."""

    @property
    def facts(self) -> Facts: ...

    def warm_up(self, scenario: Scenario) -> None:
        """The same shapes on prompts of their own, fewer tokens, no figure. Raises PeerFailed."""
        ...

    def run(self, scenario: Scenario, number: int) -> Figure:
        """One run on the prompts of that number. Raises PeerFailed."""
        ...

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far."""
        ...

    def hold(self, held: bool) -> None:
        """Stop its processes where they are, or let them go on."""
        ...


@dataclass
class Idle:
    """Who used how much CPU while others ran."""

    seconds: dict[str, float] = field(default_factory=dict)
    watched: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def watch(self, others: Sequence[Contestant]) -> Iterator[None]:
        before = [other.cpu_seconds() for other in others]
        began = time.perf_counter()
        yield
        wall = time.perf_counter() - began
        for other, used in zip(others, before, strict=True):
            name = other.facts.name
            self.seconds[name] = self.seconds.get(name, 0.0) + max(0.0, other.cpu_seconds() - used)
            self.watched[name] = self.watched.get(name, 0.0) + wall

    def cores(self) -> dict[str, float]:
        """Share of one core by contestant; nobody who was never watched."""
        return {name: self.seconds[name] / wall for name, wall in self.watched.items() if wall > 0}


@contextmanager
def held(others: Sequence[Contestant]) -> Iterator[None]:
    """Others stand still: an idle server may poll, and threads spin for a while after their last work."""
    for other in others:
        other.hold(True)
    try:
        yield
    finally:
        for other in others:
            other.hold(False)


def measure(
    contestants: Sequence[Contestant],
    scenarios: Sequence[Scenario],
    runs: int,
    idle: Idle,
    say: Callable[[ScenarioRatios], None],
) -> list[ScenarioRatios]:
    """A row for each scenario; `say` hears of it at once. The first contestant is the peer.

    Raises PeerFailed as soon as one of them fails.
    """
    by_name = {contestant.facts.name: contestant for contestant in contestants}
    peer = contestants[0].facts.name
    rows = []
    for scenario in scenarios:
        for contestant in contestants:
            contestant.warm_up(scenario)
        figures: dict[str, list[Figure]] = {name: [] for name in by_name}
        for number, name in turns(list(by_name), runs):
            time.sleep(SETTLE_SECONDS)
            others = [other for other in contestants if other is not by_name[name]]
            with idle.watch(others), held(others):
                figures[name].append(by_name[name].run(scenario, number))
        decode = scenario.kind == "decode"
        rows.append(scenario_ratios(scenario.name, scenario.rows, decode, peer, figures))
        say(rows[-1])
    return rows
