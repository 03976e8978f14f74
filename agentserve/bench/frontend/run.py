"""Both parts as rows of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from agentserve.bench.frontend.history import measure_history
from agentserve.bench.frontend.streams import StreamSizes, measure_streams
from agentserve.bench.report import Row


def measure(
    model: str, sizes: StreamSizes, tokens: int, runs: int, tell: Callable[[str], None]
) -> Sequence[Row]:
    """`runs`: of each part; the median counts."""
    cpu: list[float] = []
    middle: list[float] = []
    late: list[float] = []
    for run in range(runs):
        tell(f"streams: run {run + 1} of {runs}")
        found = measure_streams(model, sizes)
        cpu.append(found.cpu * 1e6)
        middle.append(float(np.median(found.delays)) * 1e3)
        late.append(float(np.quantile(found.delays, 0.99)) * 1e3)
    tell("histories")
    long = measure_history(model, tokens, max(runs, 5))
    known = [seconds * 1e3 for seconds in long.known]
    streams = f"{sizes.streams} streams, a token each every {sizes.tick * 1e3:g} ms"
    history = f"a history of {long.tokens:,} tokens, {long.messages} messages"
    return (
        _row(streams, "CPU of the API process per token", cpu, "us", "at most 60"),
        _row(streams, "worker's token to client's byte, median", middle, "ms", "at most 5"),
        _row(streams, "worker's token to client's byte, P99", late, "ms", "at most 20"),
        _row(history, "read, rendered, encoded: known but for its end", known, "ms", "at most 50"),
        _row(history, "read, rendered, encoded: never seen", [long.cold * 1e3], "ms", ""),
    )


def _row(group: str, name: str, runs: Sequence[float], unit: str, asked: str) -> Row:
    return Row(name, median(runs), unit, runs=tuple(runs), group=group, asked=asked)
