"""Our policy: every place has a price, the cheapest is chosen and chosen again as the wait goes on.

The formulas are in `valuation.py`, what is expected in `outlook.py`. A shadow LRU runs beside it and
leads while it is measured to be cheaper (`shadow.py`): then its decisions and its order are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tiering.policy.base import (
    Choice,
    Decision,
    Departure,
    Hints,
    Market,
    Park,
    Residency,
    Rest,
    Signal,
)
from tiering.policy.known_sessions import Entry, KnownSessions
from tiering.policy.lru import LruPolicy, copy_below
from tiering.policy.outlook import Outlook
from tiering.policy.shadow import Race, ShadowTiers
from tiering.policy.valuation import (
    Case,
    PricedParameters,
    affordable,
    chance_wanted,
    density,
    device_price,
    hold_for,
    insured,
    places,
    reachable,
    reload_of,
    restore_in,
    return_rate,
    written_through,
)
from tiering.survival import HORIZON, PointWait, Wait
from tiering.types import Tier

Foresight = Callable[[str, int], float]  # (session, turn) -> the true wait in seconds; inf: never

RANK_BOUND = 2.0  # seconds that hints can move a turn in the queue
MOST_SIGNALS = 4  # per wait: what comes after is not heard
TURNS = 32  # over which the length of a turn is averaged
NEXT_WAIT = 2.0  # seconds until a running session is taken to be back at rest and wanted again


@dataclass(slots=True)
class _State:
    """Of one wait."""

    at: float  # when `rate` was set
    rate: float = 0.0  # seconds lost per second by holding since then
    spent: float = 0.0  # by holding, in this wait
    restores: int = 0
    signals: int = 0
    copied: bool = False  # whether a copy was ordered before anything else
    shadowed: bool = False
    returns: float = 0.0  # the return rate as it was computed...
    returns_at: float = -math.inf  # ...then


class PricedPolicy:
    def __init__(
        self,
        parameters: PricedParameters | None = None,
        outlook: Outlook | None = None,
        foresight: Foresight | None = None,
        name: str = "priced",
    ) -> None:
        """foresight: knows the true waits: nothing is learned then, and no LRU leads."""
        self.parameters = parameters or PricedParameters()
        if not 0 < self.parameters.robustness <= 1:
            raise ValueError("robustness must be in (0, 1]")
        self.outlook = outlook or Outlook()
        self._name = name
        self._foresight = foresight
        self._known = KnownSessions()
        self._states: dict[str, _State] = {}
        self._market: Market | None = None
        self._lru = LruPolicy()
        self._race = Race(self.parameters.turns, self.parameters.lead, self.parameters.lead_least)
        self._shadow = ShadowTiers(self._shadow_worth)
        self._shadow_lru = ShadowTiers()
        self._turn = 0.0  # seconds from a turn's arrival to its end, as of late
        self._going = 0.0  # mean value of a host block per second, of those that were put there

    eager = True

    @property
    def name(self) -> str:
        return self._name

    @property
    def leader(self) -> str:
        """Whose decisions are made now: `priced` or `lru`."""
        return "lru" if self._race.second_leads else self._name

    @property
    def takeovers(self) -> int:
        return self._race.takeovers

    @property
    def predicted(self) -> dict[str, tuple[int, int, int]]:
        """By tool: waits that ended, and how many of them by their predicted median and P90."""
        return self.outlook.learned.predicted

    @property
    def shadow_costs(self) -> tuple[float, float]:
        """Seconds lost at resumes over the last turns: as we would have placed KV, as LRU would."""
        return self._race.sums

    # --- what happens ------------------------------------------------------------------------

    def parked(self, park: Park) -> None:
        before = self._known.get(park.session)
        if before is not None and not before.resting and park.rest is not Rest.PRESSURE:
            self._turn += (min(max(park.at - before.touched, 0.0), HORIZON) - self._turn) / TURNS
        forgotten = self._known.parked(park)
        if forgotten is not None:
            self._forget(forgotten)
        self._lru.parked(park)
        self._states[park.session] = _State(park.at)
        learned = self.outlook.learned.heard(park.tenant)
        learned.loud += (_bounded(park.hints.priority, RANK_BOUND) - learned.loud) / TURNS
        if park.rest is not Rest.PRESSURE:
            self.outlook.parked(park)

    def resumed(self, session: str, at: float, waited: float) -> None:
        state = self._states.pop(session, None)
        market = self._market
        if state is not None and state.shadowed and market is not None:
            ours = self._shadow.resumed(session, market)
            theirs = self._shadow_lru.resumed(session, market)
            if self._foresight is None:
                self._race.ran(ours, theirs)
        self._lru.resumed(session, at, waited)
        entry = self._known.resumed(session, at)
        if entry is not None and entry.park.rest is not Rest.PRESSURE:
            self.outlook.came(session, waited)

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        state = self._states.get(session)
        if state is None or state.signals >= MOST_SIGNALS:
            return
        state.signals += 1
        state.returns_at = -math.inf
        self.outlook.signalled(session, signal, at, hints)

    def gone(self, session: str, at: float, why: Departure) -> None:
        self._known.gone(session, why)
        self.outlook.gone(session, at, why)
        if why is Departure.FINISHED:
            self._forget(session)

    # --- what it answers ---------------------------------------------------------------------

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        self._market = market
        entry, state = self._known.at_rest(session), self._states.get(session)
        if entry is None or state is None:
            return Decision(Choice.DROP, math.inf, "unknown")
        self._cast_shadows(session, entry.park, state, market)
        leads = not self._race.second_leads
        seen = residency if leads else self._shadow.residency(session) or residency
        ours = self._decide(entry, state, seen, market)
        self._shadow.place(session, ours.choice, market)
        if leads:
            return ours
        theirs = self._lru.decide(session, residency, market)
        return Decision(theirs.choice, ours.until, "LRU leads", ours.price)

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        if self._race.second_leads:
            return self._lru.worth(session, tier, residency, market)
        return self._worth(session, tier, residency, market)

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        """First come, first served; a turn may count as having come when its session's first one did, as
        Continuum and InferCept order, but `seniority` seconds earlier at most, so that nobody starves.

        Senior programs end sooner and fewer contexts are alive at once; but theirs are the longest, and
        where computing is what limits, long contexts cost turns. So it is off unless tuned. A priority
        counts as having come a little earlier or later, by how far it is from what its tenant's clients say
        on average; who has said nothing yet is average.
        """
        entry = self._known.get(session)
        if entry is None:
            return (arrived,)
        age = min(max(arrived - entry.park.program, 0.0), self.parameters.seniority)
        louder = entry.park.hints.priority - self.outlook.loud(entry.park.tenant)
        return (arrived - age - _bounded(louder, RANK_BOUND),)

    # --- deciding ----------------------------------------------------------------------------

    def _decide(self, entry: Entry, state: _State, residency: Residency, market: Market) -> Decision:
        now, park = market.now, entry.park
        state.spent += state.rate * max(now - state.at, 0.0)
        state.at, state.rate = now, 0.0
        case = self._case(entry, residency, market)
        if case.resume <= 0:
            return Decision(Choice.DROP, math.inf, "nobody will come back")
        look = max(1.0, self.parameters.relook * (now - park.at))
        restore = self._restore(case, state, look)
        if restore is not None and restore.choice is Choice.RESTORE:
            return restore
        decision = self._place(case, park, state, look) if residency.device else self._below(case, look)
        if restore is not None and restore.until < decision.until:
            return Decision(decision.choice, restore.until, decision.reason, decision.price)
        return decision

    def _place(self, case: Case, park: Park, state: _State, look: float) -> Decision:
        """For a session with blocks on the device: hold them, or where else they should be."""
        now, p = case.market.now, self.parameters
        rate = case.price * case.held
        if not state.copied and park.rest is not Rest.PRESSURE and insured(case, p):
            state.copied = True
            choice = Choice.DISK if written_through(case, case.held, p) else Choice.HOST
            prices = case.market.prices
            pause = prices.seconds(prices.save, case.uncopied) if rate > 0 else look
            return Decision(choice, now + max(pause, 1e-3), "a copy is cheap", rate)
        if rate <= 0:
            return Decision(Choice.HOLD, now + look, "nobody needs the room")
        options = places(case, p)
        best = options[0]
        if park.rest is not Rest.PRESSURE:
            tau = hold_for(case, best, state.spent, p)
            left = (best.worst / p.robustness - state.spent) / rate
            reason = "worth holding"
            if tau <= 0 < left and not reachable(case, best, p):
                tau, reason = min(left, best.round_trip), "too short to move"
            if tau > 0:
                state.rate = rate
                return Decision(Choice.HOLD, now + max(min(tau, look), 1e-3), reason, rate)
        if best.choice is Choice.HOST:
            value = density(case, Tier.HOST, p)
            self._going += (value - self._going) / 32
        price = best.cost / max(case.remaining, 1e-3)
        if best.choice is Choice.HOST and written_through(case, case.held, p):
            return Decision(Choice.DISK, now + look, "host is cheapest, a copy on disk is cheap", price)
        return Decision(best.choice, now + look, f"{best.choice.value} is cheapest", price)

    def _below(self, case: Case, look: float) -> Decision:
        """For a session that has nothing on the device: whether its copy in the slab is enough."""
        residency, until = case.residency, case.market.now + look
        if residency.host == 0:
            return Decision(Choice.DISK if residency.disk else Choice.DROP, until, "not on the device")
        if written_through(case, residency.host, self.parameters):
            return Decision(Choice.DISK, until, "a copy on disk is cheap")
        return Decision(Choice.HOST, until, "waits below")

    def _restore(self, case: Case, state: _State, look: float) -> Decision | None:
        """RESTORE if it is time; else when it will be; None if never in this wait."""
        reload, p, market = reload_of(case), self.parameters, case.market
        if not reload.pays or state.restores >= p.restores or not affordable(case, reload, state.spent, p):
            return None
        chance = chance_wanted(case, reload, p)
        pause = restore_in(case.wait, case.elapsed, reload.seconds, chance)
        if pause > 0:
            until = market.now + max(pause, 1e-3)
            return Decision(Choice.HOST, until, "waits below") if pause < math.inf else None
        if market.device_free - market.demand < reload.blocks:
            again = market.now + max(p.look_least, 0.1 * look)
            return Decision(Choice.HOST, again, "no room to restore")
        state.restores += 1
        state.rate = case.price * (case.held + reload.blocks)
        until = market.now + max(reload.seconds, 1e-3)
        return Decision(Choice.RESTORE, until, "expected back", state.rate)

    # --- what is known -----------------------------------------------------------------------

    def _case(self, entry: Entry, residency: Residency, market: Market) -> Case:
        park, p = entry.park, self.parameters
        price = device_price(market, self._known.mean_blocks, p.headroom)
        wait, elapsed, resume = self._expected(entry, market)
        tight = market.host_free < residency.device - residency.copied
        return Case(
            wait=wait,
            elapsed=elapsed,
            resume=resume,
            urgency=self._urgency(park, wait, elapsed, market),
            blocks=park.blocks,
            private=park.private,
            residency=residency,
            market=market,
            price=price,
            host_price=self._going / 2 if tight else 0.0,
        )

    def _expected(self, entry: Entry, market: Market) -> tuple[Wait, float, float]:
        """The wait, how much of it has passed, and the chance that it ends."""
        park, session = entry.park, entry.park.session
        if not entry.resting:
            return PointWait(NEXT_WAIT), 0.0, 1.0
        if park.rest is Rest.PRESSURE:
            return PointWait(max(market.queue, 1e-3)), 0.0, 1.0
        if self._foresight is not None:
            true = self._foresight(session, park.turn)
            comes = 0.0 if entry.gone is not None or not true < HORIZON else 1.0
            return PointWait(true), max(market.now - park.at, 0.0), comes
        known = self.outlook.wait(session, market.now)
        if known is None:
            return PointWait(0.0), 0.0, 0.0
        return *known, self.outlook.resume(session, market.now, entry.gone)

    def _urgency(self, park: Park, wait: Wait, elapsed: float, market: Market) -> float:
        """What its client's seconds count: between a half and two, whatever it says."""
        hints = self.outlook.hints(park.session)
        urgency: float = 2.0 ** _bounded(hints.priority - self.outlook.loud(park.tenant), 1.0)
        if hints.deadline is not None:
            left = hints.deadline - market.now
            if 0 <= left <= wait.expected_hold(elapsed, HORIZON):
                urgency *= 2.0
        return min(max(urgency, 0.5), 2.0)

    def _worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        entry = self._known.get(session)
        if entry is None:
            return 0.0
        case = self._case(entry, residency, market)
        return density(case, tier, self.parameters, self._use_rate(entry, case, market.now))

    def _use_rate(self, entry: Entry, case: Case, now: float) -> float:
        """How soon its KV is used: one over the expected seconds until then.

        Who comes back waits in the queue as others did; who waits there already has the rest of that to
        wait. So of turns that wait the last to come is the first to lose (Belady), where the least
        recently used would take from each just before its turn.
        """
        if not entry.resting:
            return 1.0 / max(self._turn - (now - entry.touched), 0.05 * self._turn, 1e-3)
        state = self._states.get(entry.park.session)
        if state is None:
            return return_rate(case.wait, case.elapsed)
        # Asked for many sessions per victim: a rate that is 10 % of the wait old will do.
        fresh = 0.05 + 0.1 * (state.returns_at - entry.park.at)
        if not state.returns_at <= now < state.returns_at + fresh:
            state.returns, state.returns_at = return_rate(case.wait, case.elapsed), now
        return 1.0 / (1.0 / max(state.returns, 1e-12) + self._turn)

    # --- shadows -----------------------------------------------------------------------------

    def _cast_shadows(self, session: str, park: Park, state: _State, market: Market) -> None:
        if state.shadowed:
            return
        state.shadowed = True
        self._shadow.parked(session, park.private, market)
        self._shadow_lru.parked(session, park.private, market)
        self._shadow_lru.place(session, copy_below(market), market)

    def _shadow_worth(self, session: str, tier: Tier, residency: Residency) -> float:
        return 0.0 if self._market is None else self._worth(session, tier, residency, self._market)

    def _forget(self, session: str) -> None:
        self._states.pop(session, None)
        self.outlook.forget(session)
        self._lru.gone(session, 0.0, Departure.FINISHED)
        self._shadow.finished(session)
        self._shadow_lru.finished(session)


def _bounded(value: float, most: float) -> float:
    return min(max(float(value), -most), most)
