"""Tuning: every candidate of every tunable kernel on this GPU, the fastest of those that compute the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from agentserve.bench.gpu.device import Device
from kernels.triton.launch import Choice
from kernels.triton.tuning import Chosen, Measured, Table, Tunable, as_chosen

GAIN = 0.02  # a candidate must be so much faster than the default: less may be chance
_TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate. `seconds` is the median; `refused` says why it counts for nothing."""

    kernel: str
    key: str
    choice: Choice
    seconds: float = 0.0
    refused: str = ""


def tune(
    tunables: Sequence[Tunable],
    on: Device,
    kind: str,
    told: Callable[[Trial], None] = lambda _: None,
) -> Table:
    """A table for this GPU. Where no candidate beats the default, the default itself is in it: that was
    measured. RuntimeError where a default does not run."""
    choices: dict[str, dict[str, Chosen]] = {}
    for one in tunables:
        best = _best(one, on, told)
        choices.setdefault(one.kernel, {})[one.key] = as_chosen(best)
    measured = Measured(on.name, triton.__version__, str(torch.__version__))
    return Table(1, kind, measured, choices)


def _best(one: Tunable, on: Device, told: Callable[[Trial], None]) -> Choice:
    run = one.prepare(on.device, on.reduced)
    expected = run(one.default).clone()
    trials = []
    for choice in [one.default, *(each for each in one.candidates if each != one.default)]:
        trial = _try(one, choice, run, expected, on)
        told(trial)
        trials.append(trial)
    if trials[0].refused:
        raise RuntimeError(f"{one.kernel} {one.key}: its default: {trials[0].refused}")
    fastest = min((trial for trial in trials if not trial.refused), key=lambda trial: trial.seconds)
    return fastest.choice if fastest.seconds < (1 - GAIN) * trials[0].seconds else one.default


def _try(
    one: Tunable, choice: Choice, run: Callable[[Choice], Tensor], expected: Tensor, on: Device
) -> Trial:
    try:
        found = run(choice)
        on.finish()
    except Exception as error:  # Triton raises its own where a choice needs more than the GPU has
        return Trial(one.kernel, one.key, choice, refused=f"{type(error).__name__}: {error}".splitlines()[0])
    if not same(found, expected):
        return Trial(one.kernel, one.key, choice, refused="it computes something else")
    return Trial(one.kernel, one.key, choice, statistics.median(on.seconds(lambda: run(choice))))


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal up to the order of additions; integers exactly."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    wide, other = found.to(torch.float64), expected.to(torch.float64)
    if not bool(wide.isfinite().all()):
        return False
    most = float(other.abs().max()) if other.numel() else 0.0
    return float((wide - other).abs().max()) <= _TOLERANCE[expected.dtype] * most if other.numel() else True
