"""What is expected of sessions at rest: when they come back, and whether.

Learned waits (`tiering.waits`), what clients said (hints, early signals) by how far they can be
believed (`tiering.credit`), and how often sessions come back at all. A hint is one kind of wait in a
mixture: the longer it turns out wrong, the less it weighs. What is learned is each tenant's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tiering.credit import Said, believed
from tiering.policy.base import Departure, Hints, Park, Signal
from tiering.policy.learned import Learned, LearnedByTenant
from tiering.survival import EDGES, Curve, Wait, around, clean, mixture
from tiering.waits import name_of

MOST_NAMES = 256


class Belief(msgspec.Struct, frozen=True):
    """How far signs are believed."""

    soon: float = 0.5  # a result whose connection is open is expected in about so many seconds
    connected: float = 0.8  # chance that it is
    streaming: float = 0.95
    coming_back: float = 0.95  # chance that a session resumes at all, before there is data
    abandoned: float = 0.1  # what is left of it when its client is gone


@dataclass(slots=True)
class _View:
    """What is expected of one wait; `wait` counts from `base`."""

    name: str
    since: float
    base: float
    wait: Wait
    p99: float
    hints: Hints
    said: list[Said] = field(default_factory=list)  # by its client, of this wait


class Outlook:
    """The owner of expectations. Sessions that it does not know are not expected."""

    def __init__(self, belief: Belief | None = None) -> None:
        self.learned = LearnedByTenant()
        self._belief = belief or Belief()
        self._views: dict[str, _View] = {}
        self._tenants: dict[str, str] = {}  # session -> whose it is

    # --- what happens ------------------------------------------------------------------------

    def parked(self, park: Park) -> None:
        learned = self.learned.heard(park.tenant)
        self._tenants[park.session] = park.tenant
        learned.curves.started(park.session, park.tools, park.at)
        curve = learned.curves.curve(park.tools, park.at)
        view = _View(name_of(park.tools), park.at, park.at, curve, curve.quantile(0.99), park.hints)
        self._views[park.session] = view
        self._hear(park.session, view, park.hints, park.at)

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        view = self._views.get(session)
        if view is None:
            return
        view.hints = hints if signal is Signal.EXPECTED else view.hints
        if signal is Signal.EXPECTED:
            self._hear(session, view, hints, at)
        else:
            chance = self._belief.streaming if signal is Signal.STREAMING else self._belief.connected
            rest = remaining(view.wait, max(at - view.base, 0.0))
            self._rebase(view, at, [(chance, around(self._belief.soon)), (1.0 - chance, rest)])

    def came(self, session: str, waited: float) -> None:
        view, learned = self._views.pop(session, None), self._learned(session)
        if learned is None:
            return
        learned.curves.came(session, waited)
        if view is None:
            return
        _count(learned, view.name, 1.0, 0.0)
        for said in view.said:
            learned.credit.ended(session, said, clean(waited))

    def gone(self, session: str, at: float, why: Departure) -> None:
        """A wait that was given up is longer than so far; one that was superseded says nothing."""
        view, learned = self._views.get(session), self._learned(session)
        if learned is not None:
            if why is not Departure.ABANDONED:
                learned.curves.forget(session)
            elif view is not None:
                learned.curves.lost(session, at)
                _count(learned, view.name, 0.0, 1.0)
        if why is Departure.FINISHED:
            self.forget(session)

    def forget(self, session: str) -> None:
        learned = self._learned(session)
        if learned is not None:
            learned.curves.forget(session)
            learned.credit.forget(session)
        self._views.pop(session, None)
        self._tenants.pop(session, None)

    # --- what is expected --------------------------------------------------------------------

    def wait(self, session: str, now: float) -> tuple[Wait, float] | None:
        """Its wait, and how much of it has passed."""
        view = self._views.get(session)
        return None if view is None else (view.wait, max(now - view.base, 0.0))

    def hints(self, session: str) -> Hints:
        view = self._views.get(session)
        return Hints() if view is None else view.hints

    def resume(self, session: str, now: float, gone: Departure | None) -> float:
        """The chance that its next turn ever comes."""
        view = self._views.get(session)
        if view is None or view.hints.final or gone not in (None, Departure.ABANDONED):
            return 0.0
        learned = self._learned(session)
        came, lost = (0.0, 0.0) if learned is None else learned.returns.get(view.name, (0.0, 0.0))
        weight = 20.0
        chance = (came + weight * self._belief.coming_back) / (came + lost + weight)
        # Beyond its P99 a wait is ever less a wait: the chance falls as a Pareto tail of index 1.
        elapsed = now - view.since
        if elapsed > view.p99 > 0:
            chance *= view.p99 / elapsed
        return chance * (self._belief.abandoned if gone is Departure.ABANDONED else 1.0)

    def trust(self, session: str) -> float:
        """The chance that this session's word about its wait is to be believed."""
        learned = self._learned(session)
        return 0.0 if learned is None else sum(learned.credit.weights(session))

    def loud(self, tenant: str) -> float:
        """The mean priority of its parks as of late."""
        learned = self.learned.of(tenant)
        return 0.0 if learned is None else learned.loud

    # --- inside ------------------------------------------------------------------------------

    def _hear(self, session: str, view: _View, hints: Hints, at: float) -> None:
        learned = self._learned(session)
        if hints.expected_wait is None or learned is None:
            return
        rest = remaining(view.wait, max(at - view.base, 0.0))
        said = learned.credit.said(clean(hints.expected_wait), at - view.since, rest)
        view.said.append(said)
        self._rebase(view, at, believed(said, learned.credit.weights(session)))

    def _rebase(self, view: _View, at: float, parts: Sequence[tuple[float, Curve]]) -> None:
        """From now on its wait is one of these, by their weights."""
        view.wait = mixture(parts)
        view.base = at
        view.p99 = max(view.p99, at - view.since + view.wait.quantile(0.99))

    def _learned(self, session: str) -> Learned | None:
        """Of its tenant; None: nothing is known, or no longer."""
        tenant = self._tenants.get(session)
        return None if tenant is None else self.learned.of(tenant)


def _count(learned: Learned, name: str, came: float, lost: float) -> None:
    before = learned.returns.pop(name, (0.0, 0.0))
    fade = 1.0 - 1.0 / 512
    learned.returns[name] = (before[0] * fade + came, before[1] * fade + lost)
    while len(learned.returns) > MOST_NAMES:
        del learned.returns[next(iter(learned.returns))]


def remaining(wait: Wait, elapsed: float) -> Curve:
    """What is left of a wait after `elapsed` seconds, as a curve of its own."""
    if elapsed <= 0 and isinstance(wait, Curve):
        return wait
    return Curve([1.0 - wait.conditional(elapsed, t) for t in EDGES])
