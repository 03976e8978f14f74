"""Credit: how far clients are believed about their waits.

What a client says is an expert beside the learned curve, or rather two: one takes it at its word, one only
roughly. A wait that has ended gives each a gain, the logarithm of how much likelier it held that end than
the curve did, and experts weigh by their gains (Bayes' rule). By Gibbs' inequality who knows nothing of a
wait loses against the true curve on average, however plausible what he says is on the whole; so credit is
earned, and nothing else earns it. What one wait can gain is bounded, and more credit is lost by being
wrong than can be saved up by being right: a liar who was honest for long is not believed twice. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tiering.survival import Curve, around

SHARPNESS = (3.0, 12.0)  # of the wait that an expert makes of what was said; `survival.around`


class CreditSettings(msgspec.Struct, frozen=True):
    near: float = 1.25  # an end counts as foreseen within this factor...
    slack: float = 0.1  # ...and so many seconds
    doubt: float = 0.02  # chance that every expert leaves to anything: no gain is beyond ln(1 / it)
    memory: float = 16.0  # hints over which everybody's gain is averaged
    everybody: float = 4.0  # hints that everybody's mean gain counts as for one session
    saved: float = 4.0  # most that a session's own gains add up to
    most_sessions: int = 65536


@dataclass(slots=True)
class Said:
    """What was said about a wait, and what was known without it, from the moment on when it was said."""

    at: float  # seconds after the wait began
    experts: tuple[Curve, ...]
    known: Curve


class Credit:
    """The owner of everybody's credit."""

    def __init__(self, settings: CreditSettings | None = None) -> None:
        self._settings = settings or CreditSettings()
        self._none = [0.0] * len(SHARPNESS)
        self._mean = self._none  # gain of each expert, over everybody's hints
        self._sums: dict[str, list[float]] = {}  # by session, least recently heard first

    def said(self, expected: float, at: float, known: Curve) -> Said:
        """A client says, `at` seconds into its wait, that it ends in `expected` seconds. known: what is left
        of it as far as is known."""
        return Said(at, tuple(around(expected, sharpness) for sharpness in SHARPNESS), known)

    def weights(self, session: str) -> tuple[float, ...]:
        """The chance that each expert is to be believed; what is left is the learned curve's."""
        saved, own = self._settings.saved, self._sums.get(session)
        odds = _within([self._settings.everybody * mean for mean in self._mean], -saved, saved / 2)
        parts = [math.exp(each + sum_) for each, sum_ in zip(odds, own or self._none, strict=True)]
        total = len(SHARPNESS) + sum(parts)
        return tuple(part / total for part in parts)

    def ended(self, session: str, said: Said, waited: float) -> None:
        """A wait about which this was said has ended after `waited` seconds."""
        settings, after = self._settings, max(waited - said.at, 0.0)
        known = self._held(said.known, after)
        gains = [math.log(self._held(expert, after) / known) for expert in said.experts]
        before = self._sums.pop(session, self._none)
        own = [have + gain for have, gain in zip(before, gains, strict=True)]
        self._sums[session] = _within(own, -2 * settings.saved, settings.saved)
        self._mean = [
            mean + (gain - mean) / settings.memory for mean, gain in zip(self._mean, gains, strict=True)
        ]
        while len(self._sums) > settings.most_sessions:
            del self._sums[next(iter(self._sums))]

    def forget(self, session: str) -> None:
        self._sums.pop(session, None)

    def _held(self, curve: Curve, seconds: float) -> float:
        """The chance that it gave to an end near this one."""
        settings = self._settings
        early = max(seconds / settings.near - settings.slack, 0.0)
        late = seconds * settings.near + settings.slack
        mass = curve.survival(early) - curve.survival(late)
        return settings.doubt + (1.0 - settings.doubt) * min(max(mass, 0.0), 1.0)


def _within(odds: Sequence[float], least: float, most: float) -> list[float]:
    """The best at most `most`, the others as far behind it as they were; none below `least`."""
    above = max(max(odds) - most, 0.0)
    return [max(each - above, least) for each in odds]


def believed(said: Said, weights: Sequence[float]) -> list[tuple[float, Curve]]:
    """The parts of the wait as a mixture: experts by their weights, and what is known."""
    parts = list(zip(weights, said.experts, strict=True))
    return [*parts, (max(1.0 - sum(weights), 0.0), said.known)]
