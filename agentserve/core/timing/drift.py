"""The cost model refreshed by each step that ran: how much slower the machine is now, how far steps stray.

Two figures move, each a little per step and within bounds, so that the model stays what it was fitted to be
(non-negative, monotone, continuous):

- `pace` follows the median of measured / predicted: up where a step took longer, down where it did not, by
  no more than `most` per step, however far off that was. One stalled step moves it as far as any other.
- `ratio` follows the quantile that the bound stands for: up by `gain` x quantile where a step exceeded it,
  down by `gain` x (1 - quantile) where none did, which balances where the bound is exceeded as often as it
  is meant to be, whatever the noise (adaptive conformal inference, Gibbs and Candes 2021). It never falls
  below what was fitted.

A pure fold: the same steps give the same model.
"""

from __future__ import annotations

import math

import msgspec

from agentserve.core.cost import StepCost
from agentserve.core.timing.features import StepLoad


class DriftSettings(msgspec.Struct, frozen=True):
    most: float = 0.02  # of the pace, per step
    scale: float = 0.1  # of (measured - predicted) / the larger, from which on the pace moves by `most`
    furthest: float = 8.0  # times the pace that was fitted, and this part of it
    quantile: float = 0.99  # that the bound stands for
    gain: float = 0.05  # of the ratio
    widest: float = 4.0  # times the ratio that was fitted


class Drift:
    """The owner of the model in use. Plain arithmetic alone: the same on every machine, to the last bit."""

    def __init__(self, fitted: StepCost, settings: DriftSettings | None = None) -> None:
        self._fitted = fitted
        self._settings = settings or DriftSettings()
        self.known = fitted.known
        self.cost = fitted

    def ran(self, load: StepLoad, seconds: float, predicted: float = 0.0) -> None:
        """A step of `load` took `seconds`. What cannot be a measurement changes nothing.
        predicted: what it was planned with; 0: by the model in use."""
        if not self.known or not 0 < seconds < math.inf:
            return
        predicted = predicted or self.cost.predict(load)
        if predicted <= 0:
            return
        told, fitted, cost = self._settings, self._fitted, self.cost
        off = (seconds - predicted) / max(seconds, predicted)
        pace = cost.pace * (1.0 + told.most * min(max(off / told.scale, -1.0), 1.0))
        pace = min(max(pace, fitted.pace / told.furthest), fitted.pace * told.furthest)
        ratio = cost.ratio
        if fitted.bounded:
            exceeded = seconds > cost.at_worst(predicted)
            ratio *= 1.0 + told.gain * (told.quantile if exceeded else told.quantile - 1.0)
            ratio = min(max(ratio, fitted.ratio), fitted.ratio * told.widest)
        if pace != cost.pace or ratio != cost.ratio:
            self.cost = msgspec.structs.replace(fitted, pace=pace, ratio=ratio)
