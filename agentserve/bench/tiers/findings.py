"""What the parts of the benchmark hand on: rows, notes, and what could not be measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentserve.bench.report import Row


@dataclass
class Findings:
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """What a figure is beside, in the same unit."""

    value: float
    name: str

    @classmethod
    def of(cls, runs: Sequence[float], name: str) -> Limit:
        return cls(statistics.median(runs), name)


def rate_row(
    group: str, name: str, runs: Sequence[float], limit: Limit | None = None, asked: str = ""
) -> Row:
    """A median of rates in GB/s: the higher, the better."""
    beside, of = (limit.value, limit.name) if limit else (None, "")
    return Row(name, statistics.median(runs), "GB/s", beside, of, True, tuple(runs), group, asked=asked)


def time_row(
    group: str, name: str, runs: Sequence[float], limit: Limit | None = None, asked: str = ""
) -> Row:
    """A median of times in milliseconds, from seconds: the lower, the better."""
    runs = tuple(1e3 * run for run in runs)
    beside, of = (1e3 * limit.value, limit.name) if limit else (None, "")
    return Row(name, statistics.median(runs), "ms", beside, of, False, runs, group, asked=asked)
