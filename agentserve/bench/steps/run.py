"""Fit to the steps of one load, then predict those of another: as it is, and refreshed as it goes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from agentserve.bench.report import Row
from agentserve.bench.steps.episodes import drive
from agentserve.clock import WallClock
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.plan import Plan, StepResult
from agentserve.core.timing.drift import Drift
from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.core.timing.fitting import Fitted, Quality, Timed, fit, judged, quality
from agentserve.core.timing.saved import SavedCost
from agentserve.messages import WorkerView
from agentserve.records.reader import read_records
from agentserve.records.series import iterations_writer
from agentserve.records.steps import timed_steps
from agentserve.records.writer import Bounds
from agentserve.server.workers.iterations import IterationLog, step_features
from agentserve.server.workers.worker_main import BuiltEngine

MAPE_ASKED = 0.10
EXCEEDED_ASKED = 0.02
WARM_UP = 40  # steps that are run first and recorded nowhere
SEEDS = (1, 1_000_001)  # of the load that is fitted to, and of the one that is predicted
SIZE = 1 << 30  # bytes of a recording


@dataclass
class Findings:
    saved: SavedCost
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(
    built: BuiltEngine, steps: int, folder: Path, seed: int, progress: Callable[[str], None]
) -> Findings:
    """steps: of each load. folder: where they are recorded, in `fitted` and `held-out`."""
    assert built.fingerprint is not None
    progress("warm-up")
    drive(built, WARM_UP, seed + 7, lambda *_: None)
    parts = []
    for name, number in zip(("fitted", "held-out"), SEEDS, strict=True):
        progress(f"{steps} steps, {name}")
        parts.append(record(built, steps, folder / name, seed + number))
    progress("fit")
    return findings(fit(parts[0]), parts[1], built.fingerprint)


def record(built: BuiltEngine, steps: int, folder: Path, seed: int) -> list[Timed]:
    """So many steps, as a worker records them. ValueError if the folder cannot be written."""
    shutil.rmtree(folder, ignore_errors=True)
    clock = WallClock()
    writer = iterations_writer(
        folder, Bounds(SIZE, 1), built.hello, "", clock, worker=0,
        groups=[group.name for group in built.groups],
        step_tokens=cast(CoreConfig, built.config).max_batched_tokens, fingerprint=built.fingerprint,
    )  # fmt: skip
    log = IterationLog(writer, step_features(built.attention))

    def stepped(plan: Plan, result: StepResult, view: WorkerView, began: float) -> None:
        log.ran(plan, result.seconds, began, clock.now())
        log.reported([], view)

    try:
        drive(built, steps, seed, stepped)
    finally:
        log.close()
    if writer.failure:
        raise ValueError(f"{folder}: {writer.failure}")
    found, left_out = timed_steps(read_records(folder).iterations)
    if left_out or len(found) != steps:
        raise ValueError(f"{folder}: {len(found)} of {steps} steps were recorded")
    return found


def findings(fitted: Fitted, steps: Sequence[Timed], fingerprint: Fingerprint) -> Findings:
    """steps: of the load that is held out."""
    plain, refreshed = quality(fitted.cost, steps), as_it_goes(fitted.cost, steps)
    saved = SavedCost(fingerprint=fingerprint, cost=fitted.cost, steps=fitted.steps, held_out=plain)
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
