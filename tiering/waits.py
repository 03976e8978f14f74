"""How long waits last, learned online per tool name, with right-censoring.

A wait that ended says how long it was. One that was given up, or that still goes on, says only that
it is longer than so far; leaving it out would make every tool look faster than it is. The estimate
is the product limit (Kaplan & Meier, 1958) on log-spaced bins, with a prior curve as so many
pseudo-observations (Susarla & Van Ryzin, 1976): a tool's prior is the curve of all tools, theirs is
the published one. Old observations fade with new ones, not with time. Pure.

Memory: `max_names` names, each of fixed bins (about 2 x 145 numbers, and as many again while its curve
is kept): under 4 MB for 256 names, whatever their number of waits. The least recently used name goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tiering.survival import BINS, IDLE_PRIOR, TOOL_PRIOR, Curve, bin_of, clean, longest

IDLE = "(idle)"  # the name under which a session's own pauses are learned
NAME_LENGTH = 128  # characters of a name that count
TOOLS_IN_NAME = 4  # of several calls at once, so many distinct names count

_RESCALE = 1e9


class WaitSettings(msgspec.Struct, frozen=True):
    prior_weight: float = 8.0  # pseudo-observations that a name's prior stands for
    memory: float = 512.0  # observations of a name after which an old one has faded to 1/e
    max_names: int = 256


@dataclass(slots=True)
class _Open:
    """A wait that goes on."""

    name: str
    since: float
    median: float  # as predicted when it began
    p90: float


class _Sample:
    """Decaying counts of one name."""

    __slots__ = ("built", "came", "curve", "gone", "news", "open", "seen", "weight")

    def __init__(self) -> None:
        self.came = array("d", bytes(8 * BINS))  # weight of the waits that ended in each bin
        self.gone = array("d", bytes(8 * BINS))  # of those that were given up there
        self.weight = 1.0  # of the next observation: older ones fade because it grows
        self.seen = 0
        self.open: dict[str, float] = {}  # session -> since
        self.curve: Curve | None = None
        self.built = 0.0
        self.news = 0  # observations since the curve was built

    def add(self, seconds: float, censored: bool, memory: float) -> None:
        bins = self.gone if censored else self.came
        bins[bin_of(seconds)] += self.weight
        self.seen += 1
        self.news += 1
        self.weight *= 1.0 + 1.0 / memory
        if self.weight > _RESCALE:
            for i in range(BINS):
                self.came[i] /= self.weight
                self.gone[i] /= self.weight
            self.weight = 1.0

    def stale(self, now: float) -> bool:
        return (
            self.curve is None
            or self.news > self.seen // 50
            or ((self.news > 0 or bool(self.open)) and not self.built <= now < self.built + 1.0)
        )


class WaitCurves:
    """The owner of everything that is known about waits."""

    def __init__(self, settings: WaitSettings | None = None) -> None:
        settings = settings or WaitSettings()
        if not (settings.prior_weight > 0 and settings.memory >= 1 and settings.max_names >= 1):
            raise ValueError("waits need a positive prior weight, a memory of at least 1 and a name to learn")
        self._settings = settings
        self._samples: dict[str, _Sample] = {}  # least recently used first
        self._everything = _Sample()  # all tools together
        self._idle = _Sample()
        self._open: dict[str, _Open] = {}
        # For operators, by name: waits that ended, and how many by their predicted median and P90
        # (ideal: a half, and nine in ten).
        self.predicted: dict[str, tuple[int, int, int]] = {}

    # --- what happens ------------------------------------------------------------------------

    def started(self, session: str, tools: Sequence[str], at: float) -> None:
        """A session began to wait for these tools; for none: for its user."""
        self.forget(session)
        name = name_of(tools)
        curve = self.curve(tools, at)
        self._open[session] = _Open(name, at, curve.quantile(0.5), curve.quantile(0.9))
        for sample in self._samples_of(name):
            sample.open[session] = at

    def came(self, session: str, waited: float) -> None:
        """Its wait ended after `waited` seconds; a session that did not wait changes nothing."""
        wait = self._close(session)
        if wait is None or not 0 <= waited < float("inf"):
            return
        for sample in self._samples_of(wait.name):
            sample.add(waited, False, self._settings.memory)
        waits, median, p90 = self.predicted.get(wait.name, (0, 0, 0))
        if waits or len(self.predicted) <= self._settings.max_names:
            by_median, by_p90 = waited <= wait.median, waited <= wait.p90
            self.predicted[wait.name] = (waits + 1, median + by_median, p90 + by_p90)

    def lost(self, session: str, at: float) -> None:
        """Its wait was given up: it would have been longer than so far."""
        wait = self._close(session)
        if wait is not None:
            for sample in self._samples_of(wait.name):
                sample.add(clean(at - wait.since), True, self._settings.memory)

    def forget(self, session: str) -> None:
        """Whatever it waited for says nothing."""
        self._close(session)

    # --- what is known -----------------------------------------------------------------------

    def curve(self, tools: Sequence[str], now: float) -> Curve:
        """Of a wait for all of these tools; of none: for the user. Unknown names have the prior."""
        name = name_of(tools)
        if name == IDLE:
            return self._built(self._idle, IDLE_PRIOR, now)
        prior = self._built(self._everything, TOOL_PRIOR, now)
        sample = self._samples.get(name)
        distinct = _distinct(tools)
        if len(distinct) > 1:
            if sample is not None and not sample.stale(now) and sample.curve is not None:
                return sample.curve
            prior = longest([self.curve((tool,), now) for tool in distinct])
        return prior if sample is None else self._built(sample, prior, now)

    def names(self) -> Iterator[str]:
        """Names with data of their own."""
        return iter(tuple(self._samples))

    @property
    def known(self) -> int:
        """How many these are."""
        return len(self._samples)

    @property
    def waiting(self) -> int:
        return len(self._open)

    # --- inside ------------------------------------------------------------------------------

    def _close(self, session: str) -> _Open | None:
        wait = self._open.pop(session, None)
        if wait is not None:
            for sample in self._samples_of(wait.name):
                sample.open.pop(session, None)
        return wait

    def _samples_of(self, name: str) -> tuple[_Sample, ...]:
        own = self._sample(name)
        return (own,) if own is self._idle else (own, self._everything)

    def _sample(self, name: str) -> _Sample:
        if name == IDLE:
            return self._idle
        sample = self._samples.pop(name, None) or _Sample()
        self._samples[name] = sample
        while len(self._samples) > self._settings.max_names:
            del self._samples[next(iter(self._samples))]
        return sample

    def _built(self, sample: _Sample, prior: Curve, now: float) -> Curve:
        """The sample's curve, as fresh as a second or 2 % of its observations ask for."""
        if sample.curve is None or sample.stale(now):
            sample.curve = self._product_limit(sample, prior, now)
            sample.built, sample.news = now, 0
        return sample.curve

    def _product_limit(self, sample: _Sample, prior: Curve, now: float) -> Curve:
        unit = sample.weight
        came = [count / unit for count in sample.came]
        gone = [count / unit for count in sample.gone]
        for since in sample.open.values():
            gone[bin_of(now - since)] += 1.0
        weight, before = self._settings.prior_weight, prior.values
        at_risk, alive, values = sum(came) + sum(gone), 1.0, [1.0]
        for i in range(BINS):
            ended = came[i] + weight * (before[i] - before[i + 1])
            # The actuarial convention: who was given up within a bin was at risk for half of it.
            exposed = max(at_risk - gone[i] / 2, came[i]) + weight * before[i]
            alive *= 1.0 - min(ended / exposed, 1.0)
            values.append(alive)
            at_risk = max(at_risk - came[i] - gone[i], 0.0)
        return Curve(values)


def name_of(tools: Sequence[str]) -> str:
    """Under which name a wait for these tools is learned. Order and repetition do not matter."""
    return " + ".join(_distinct(tools)) or IDLE


def _distinct(tools: Sequence[str]) -> list[str]:
    return sorted({tool[:NAME_LENGTH] for tool in tools})[:TOOLS_IN_NAME]
