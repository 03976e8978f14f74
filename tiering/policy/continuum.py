"""Continuum (arXiv 2511.02230): keep KV for a time to live that its tool's waits make worth it.

    TTL = argmax over t of F(t) x (T x eta + reload) - t

with F the empirical distribution of the tool's waits (fewer than 100: of all tools; fewer than that: an
exponential), t from {0} and the samples, T the mean queueing delay of a turn, eta = -Corr(k, N - k) of
turns done and turns left, reload the prefill or reload that a miss costs (its equation 2). Admission by
(preempted, within TTL, the program's arrival); when nothing fits, the program that arrived last is
unpinned. What is past its TTL is evicted, to host memory where there is some (it ran with LMCache).
`public_code` is the rule that its published code is reported to have: 2 s if the tool's mean is at most
2 s, else nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Rest, Signal
from tiering.policy.known_sessions import Entry, KnownSessions
from tiering.policy.pin import PINNED
from tiering.types import Tier
from tiering.waits import name_of

MOST_SAMPLES = 512  # per tool and of all; the oldest go
MOST_TOOLS = 256


class ContinuumParameters(msgspec.Struct, frozen=True):
    samples: int = 100  # below which a tool's own waits are not used (K)
    default_mean: float = 1.0  # seconds, of the exponential before there are samples
    default_eta: float = 1.0  # before two programs have finished: as for programs of one length
    public_code: bool = False
    public_ttl: float = 2.0


def best_ttl(samples: Sequence[float], benefit: float) -> float:
    """argmax over {0} and the samples of F(t) x benefit - t; the least of equals."""
    best, gain = 0.0, 0.0
    ordered = sorted(samples)
    for i, t in enumerate(ordered):
        value = (i + 1) / len(ordered) * benefit - t
        if value > gain:
            best, gain = t, value
    return best


def exponential_ttl(mean: float, benefit: float) -> float:
    """The same for exponential waits: (1 - exp(-t / mean)) x benefit - t is largest there."""
    return mean * math.log(benefit / mean) if benefit > mean else 0.0


class Correlation:
    """Pearson's, over pairs that come one by one."""

    def __init__(self) -> None:
        self._n = 0
        self._x = self._y = self._xx = self._yy = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._n += 1
        self._x, self._y = self._x + x, self._y + y
        self._xx, self._yy, self._xy = self._xx + x * x, self._yy + y * y, self._xy + x * y

    def value(self) -> float | None:
        """None while it is undefined."""
        over = self._n * self._xy - self._x * self._y
        under = (self._n * self._xx - self._x**2) * (self._n * self._yy - self._y**2)
        return over / math.sqrt(under) if under > 0 else None


@dataclass(slots=True)
class _Lease:
    until: float
    kept: bool = True  # whether its turn came within it


class ContinuumPolicy:
    name = "continuum"
    eager = False

    def __init__(self, parameters: ContinuumParameters | None = None) -> None:
        self.parameters = parameters or ContinuumParameters()
        self._known = KnownSessions()
        self._leases: dict[str, _Lease] = {}
        self._samples: dict[str, deque[float]] = {}
        self._turns = Correlation()
        self._programs = 0
        self._delay = 0.0  # T: mean queueing delay, fading

    @property
    def eta(self) -> float:
        measured = self._turns.value() if self._programs >= 2 else None
        return self.parameters.default_eta if measured is None else min(max(-measured, 0.0), 1.0)

    def parked(self, park: Park) -> None:
        forgotten = self._known.parked(park)
        if forgotten is not None:
            self._leases.pop(forgotten, None)
        self._leases.pop(park.session, None)

    def resumed(self, session: str, at: float, waited: float) -> None:
        entry, lease = self._known.resumed(session, at), self._leases.get(session)
        if lease is not None:
            lease.kept = at <= lease.until
        if entry is not None and entry.park.tools and math.isfinite(waited):
            for name in _names(entry.park):
                self._sample(name).append(waited)

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        pass

    def gone(self, session: str, at: float, why: Departure) -> None:
        entry = self._known.gone(session, why)
        if entry is not None and why is Departure.FINISHED:
            self._leases.pop(session, None)
            self._programs += 1
            turns = min(entry.park.turn, 1000)
            for done in range(1, turns + 1):
                self._turns.add(done, turns - done)

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        entry = self._known.at_rest(session)
        if entry is None:
            return Decision(Choice.DROP, math.inf, "unknown")
        self._delay += (market.queue - self._delay) / 32
        lease = self._leases.get(session)
        if lease is None:
            lease = self._leases[session] = _Lease(entry.park.at + self._ttl(entry, residency, market))
        if market.now < lease.until and entry.gone is None:
            return Decision(Choice.HOLD, lease.until, "within its TTL")
        choice = Choice.HOST if market.host > 0 else Choice.DROP
        return Decision(choice, math.inf, "past its TTL")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        entry, lease = self._known.get(session), self._leases.get(session)
        if entry is None:
            return -math.inf
        if entry.resting and entry.gone is None and lease is not None and market.now < lease.until:
            return PINNED - entry.park.program  # who arrived last is unpinned first
        return entry.touched

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        entry, lease = self._known.get(session), self._leases.get(session)
        if entry is None:
            return (1.0, 1.0, arrived)
        preempted = entry.resting and entry.park.rest is Rest.PRESSURE
        within = lease is not None and lease.kept
        return (0.0 if preempted else 1.0, 0.0 if within else 1.0, entry.park.program)

    def _ttl(self, entry: Entry, residency: Residency, market: Market) -> float:
        p, prices, blocks = self.parameters, market.prices, entry.park.blocks
        own, everything = (self._samples.get(name, deque()) for name in _names(entry.park))
        if p.public_code:
            mean = sum(own) / len(own) if own else math.inf
            return p.public_ttl if mean <= p.public_ttl else 0.0
        reload = prices.recompute(0, blocks * prices.page_size)
        if market.host > 0:
            reload = min(reload, prices.seconds(prices.load, blocks))
        benefit = self._delay * self.eta + reload
        for samples in (own, everything):
            if len(samples) > p.samples:
                return best_ttl(samples, benefit)
        return exponential_ttl(p.default_mean, benefit)

    def _sample(self, name: str) -> deque[float]:
        samples = self._samples.pop(name, None)
        if samples is None:
            samples = deque(maxlen=MOST_SAMPLES)
        self._samples[name] = samples
        while len(self._samples) > MOST_TOOLS:
            del self._samples[next(iter(self._samples))]
        return samples


def _names(park: Park) -> tuple[str, str]:
    """Under which a wait is learned: of these tools, and of all; what a tenant's tools take is its own."""
    return f"{park.tenant} {name_of(park.tools)}", park.tenant
