"""Fit to the steps of one load, then predict those of another: as it is, and refreshed as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from agentserve.bench.report import Row
from agentserve.bench.steps.episodes import drive
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.timing.drift import Drift
from agentserve.core.timing.fitting import Fitted, Quality, Timed, fit, judged, quality
from agentserve.core.timing.iterations import LOG_VERSION, Log, LogHeader, read_log
from agentserve.core.timing.saved import SavedCost
from agentserve.server.workers.step_log import StepLog
from agentserve.server.workers.worker_main import BuiltEngine

MAPE_ASKED = 0.10
EXCEEDED_ASKED = 0.02
WARM_UP = 40  # steps that are run first and recorded nowhere
SEEDS = (1, 1_000_001)  # of the load that is fitted to, and of the one that is predicted
LOG_SIZE = 1 << 30


@dataclass
class Findings:
    saved: SavedCost
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(
    built: BuiltEngine, steps: int, folder: Path, seed: int, progress: Callable[[str], None]
) -> Findings:
    """steps: of each load. folder: where the step logs go, `fitted.jsonl` and `held-out.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    progress("warm-up")
    drive(built, WARM_UP, seed + 7, lambda *_: None)
    logs = []
    for name, number in zip(("fitted", "held-out"), SEEDS, strict=True):
        progress(f"{steps} steps, {name}")
        logs.append(record(built, steps, folder / f"{name}.jsonl", seed + number))
    progress("fit")
    fitted = fit(logs[0].timed)
    return findings(fitted, logs[1], logs[0].header)


def record(built: BuiltEngine, steps: int, path: Path, seed: int) -> Log:
    """The log of so many steps, as a worker writes it."""
    assert built.fingerprint is not None
    header = LogHeader(
        version=LOG_VERSION,
        fingerprint=built.fingerprint,
        groups=tuple(group.name for group in built.groups),
        page_size=built.hello.page_size,
        step_tokens=cast(CoreConfig, built.config).max_batched_tokens,
    )
    path.unlink(missing_ok=True)
    steps_log = StepLog.at(path, LOG_SIZE, header, built.attention)
    try:
        drive(built, steps, seed, steps_log.add)
    finally:
        steps_log.close()
    return read_log(path.read_bytes())


def findings(fitted: Fitted, held_out: Log, header: LogHeader) -> Findings:
    steps = held_out.timed
    plain, refreshed = quality(fitted.cost, steps), as_it_goes(fitted.cost, steps)
    saved = SavedCost(fingerprint=header.fingerprint, cost=fitted.cost, steps=fitted.steps, held_out=plain)
    found = Findings(saved)
    found.rows += _rows("held-out load, as fitted", plain, asked=True)
    found.rows += _rows("held-out load, refreshed", refreshed, asked=True)
    found.rows += _rows("same load, held-out steps", fitted.held_out)
    found.rows += _rows("steps that were fitted to", fitted.inside)
    found.rows += _by_length(fitted.cost, steps)
    found.notes += [shown(fitted.cost), *_composition(steps)]
    if fitted.unseen:
        found.notes.append(f"no step had any of: {', '.join(fitted.unseen)}; predicted to cost nothing")
    return found


def as_it_goes(cost: StepCost, steps: Sequence[Timed]) -> Quality:
    """Each step predicted before it ran, by a model that all steps before it have refreshed."""
    drift = Drift(cost)
    predicted, bounds = [], []
    for step in steps:
        predicted.append(drift.cost.predict(step.load))
        bounds.append(drift.cost.bound(step.load))
        drift.ran(step.load, step.seconds)
    return judged(np.array(predicted), np.array(bounds), np.array([step.seconds for step in steps]))


def _rows(name: str, found: Quality, *, asked: bool = False) -> list[Row]:
    def row(what: str, value: float, unit: str, most: float | None = None) -> Row:
        if most is None or not asked:
            return Row(f"{name}: {what}", value, unit, group=name)
        return Row(f"{name}: {what}", value, unit, most, "asked", group=name, asked=f"at most {most:g} %")

    return [
        row("MAPE", 100 * found.mape, "%", 100 * MAPE_ASKED),
        row("median error", 100 * found.median, "%"),
        row("P95 error", 100 * found.p95, "%"),
        row("P99 bound exceeded", 100 * found.exceeded, "%", 100 * EXCEEDED_ASKED),
        row("bound / prediction", found.width, "x"),
    ]


def _by_length(cost: StepCost, steps: Sequence[Timed]) -> list[Row]:
    """Errors of the shortest, middle and longest steps, by what was predicted."""
    ordered = sorted(steps, key=lambda step: cost.predict(step.load))
    rows = []
    thirds = np.array_split(np.arange(len(ordered)), 3)
    for name, part in zip(("shortest", "middle", "longest"), thirds, strict=True):
        third = [ordered[int(place)] for place in part]
        found = quality(cost, third)
        span = f"{cost.predict(third[0].load) * 1e3:.1f} to {cost.predict(third[-1].load) * 1e3:.1f} ms"
        rows += [
            Row(f"{name} third ({span}): MAPE", 100 * found.mape, "%", group="by length"),
            Row(f"{name} third ({span}): P99 bound exceeded", 100 * found.exceeded, "%", group="by length"),
        ]
    return rows


def shown(cost: StepCost) -> str:
    """The coefficients that are not 0."""
    parts = [
        f"{name} {getattr(cost, name):.3g}"
        for name in cost.__struct_fields__
        if name not in ("knots", "slopes", "pace") and getattr(cost, name)
    ]
    slopes = ", ".join(
        f"{slope * 1e6:.3g} from {knot}" for knot, slope in zip(cost.knots, cost.slopes, strict=True)
    )
    return f"seconds: {', '.join(parts)}; us per token row: {slopes}"


def _composition(steps: Sequence[Timed]) -> list[str]:
    mixed = sum(step.load.decodes > 0 < step.load.chunks for step in steps)
    alone = sum(step.load.chunks == 0 for step in steps)
    shares = sum(step.load.read < step.load.context for step in steps)
    return [
        f"held-out load: {len(steps)} steps, {alone} of decodes alone, {mixed} mixed, "
        f"{shares} in which decodes share a prefix"
    ]
