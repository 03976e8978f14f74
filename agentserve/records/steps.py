"""Recorded iterations as what a cost model is fitted to and judged by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from agentserve.core.timing.features import StepLoad
from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.core.timing.fitting import Quality, Timed, judged
from agentserve.records.lines import IterationRecord
from agentserve.records.reader import Records


def timed_steps(iterations: Sequence[IterationRecord]) -> tuple[list[Timed], int]:
    """Steps that ran, and how many iterations could not be used: without features, or not of this form."""
    steps, left_out = [], 0
    for record in iterations:
        if record.failed:
            continue
        try:
            load = msgspec.convert(record.features, StepLoad, strict=False)  # JSON told floats
        except msgspec.ValidationError:
            left_out += 1
        else:
            steps.append(Timed(load, record.model_ms / 1e3))
    return steps, left_out


def as_they_ran(iterations: Sequence[IterationRecord]) -> Quality | None:
    """How well steps were predicted when they ran; None if none was."""
    steps = [each for each in iterations if each.predicted_ms > 0 and each.model_ms > 0 and not each.failed]
    if not steps:
        return None
    rows = [(each.predicted_ms, each.bound_ms or each.predicted_ms, each.model_ms) for each in steps]
    predicted, bounds, took = np.array(rows).T
    return judged(predicted, bounds, took)


def whose_steps(records: Sequence[Records]) -> Fingerprint:
    """Raises ValueError, one line, if it is not known, or they are of several machines or settings."""
    found: Fingerprint | None = None
    for opened in (each for part in records for each in part.opened):
        if opened.worker is None or opened.fingerprint is None:
            continue
        if found is not None and (differ := found.differences(opened.fingerprint)):
            raise ValueError(f"these are steps of several machines or settings: {'; '.join(differ)}")
        found = opened.fingerprint
    if found is None:
        raise ValueError("no recording of a worker's iterations: nothing says whose steps these are")
    return found
