"""What is to be measured, one case at a time, and what becomes of cases that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agentserve.bench.kernels.timing import Stopwatch
from agentserve.bench.report import Row


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are measured together. `fits`: the pool has the pages that it needs."""

    group: str
    name: str
    measure: Callable[[], list[Row]]
    fits: bool = True


@dataclass(slots=True)
class Findings:
    """Rows as they come, what is missing and why, and remarks."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, cases: Iterable[Case], watch: Stopwatch) -> None:
        """Measure `cases`, as long as there is time."""
        for case in cases:
            name = f"{case.group}: {case.name}"
            if not case.fits:
                self.skipped[name] = "too little memory for its KV"
            elif watch.over:
                self.skipped[name] = "the time was up"
            else:
                self.rows += case.measure()
