"""What each place for a session's KV costs while it waits: the formulas of the priced policy.

Everything is in seconds lost: by others, who lack the blocks that a session holds, or by the session
when it comes back. With W the rest of the wait, n its private blocks, p the chance that it comes back:

    hold for t:   price x n x E[min(W, t)]  and, if it is not back by then, what lies below
    below:        moving + price there x n x E[W] + p x (reload that is not hidden + queue)
    drop:         p x (recompute + queue)

The price of a device block is 1 / (mean session) per second while somebody lacks blocks (Continuum,
arXiv 2511.02230: a session's memory held for a second delays one session of mean size by one). Holding
charges E[min(W, t)], what is really held, where Continuum charges t; so holding pays while hazard x
benefit >= price x n. Learned and said waits only ever move the end of holding within a factor
`robustness` around break-even, the point where holding has cost what leaving costs (ski rental): a
wrong prediction costs at most a constant factor of the best of holding and leaving (Purohit, Svitkina
and Kumar, NeurIPS 2018). Before anything else a copy is made where that is cheap: only what has a copy
can leave without loss, and the copy and one reload are all that it adds. Pure functions of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from tiering.policy.base import Choice, Market, Prices, Residency
from tiering.survival import HORIZON, Wait
from tiering.types import Tier


class PricedParameters(msgspec.Struct, frozen=True):
    """What a sweep may tune."""

    queue_weight: float = 0.0  # of a second in the queue; residency does not shorten it where turns go by age
    headroom: float = 0.25  # share of the pool below which free blocks begin to have a price
    robustness: float = 0.5  # in (0, 1]: holding ends between this x and 1/this x break-even
    background: float = 0.25  # share of a copy's seconds that steps feel
    hidden: float = 0.5  # share of a reload that early restoring hides
    margin: float = 1.5  # a move needs a wait this many times its round trip...
    window: float = 0.5  # ...with this chance
    insurance: float = 0.2  # chance that room which nobody needs now is needed before the wait ends
    late: float = 1.0  # worth of a second of a waiting client
    early: float = 0.05  # a restore needs at least this chance of a return in its time
    restores: int = 2  # per wait: more could be forced by false signals
    seniority: float = 0.0  # seconds that a turn of an old program may count as having come earlier
    relook: float = 0.5  # look again after this share of the time that has passed
    look_least: float = 0.05  # seconds
    turns: int = 64  # over which the shadows are compared
    lead: float = 0.02  # LRU leads when it was cheaper by more than this share...
    lead_least: float = 0.001  # ...and so many seconds per turn
    resident: float = (
        0.0  # seconds that a turn whose KV is all on the device may count as having come earlier
    )


class Case(msgspec.Struct, frozen=True):
    """A session at rest at one moment."""

    wait: Wait
    elapsed: float
    resume: float  # the chance that it comes back
    urgency: float  # in [1/2, 2]: what its client's seconds count
    blocks: int
    private: int
    residency: Residency
    market: Market
    price: float  # of a device block for a second
    host_price: float = 0.0

    @property
    def held(self) -> int:
        """Private blocks on the device."""
        return min(self.private, self.residency.device)

    @property
    def uncopied(self) -> int:
        return max(min(self.held, self.residency.device - self.residency.copied), 0)

    @property
    def remaining(self) -> float:
        """E[W]."""
        return self.wait.expected_hold(self.elapsed, HORIZON)


@dataclass(frozen=True, slots=True)
class Place:
    """One place below the device: what going there is expected to cost, and at worst."""

    choice: Choice
    cost: float
    worst: float  # if the session comes back just then, with nothing hidden
    round_trip: float  # seconds of moving there and back; 0 for dropping


def device_price(market: Market, mean_blocks: float, headroom: float) -> float:
    """Of one block for one second: full while somebody lacks blocks, nothing while plenty are free."""
    room = headroom * market.device
    if room <= 0:
        return 1.0 / mean_blocks if market.demand > market.device_free else 0.0
    pressure = 1.0 - (market.device_free - market.demand) / room
    return min(max(pressure, 0.0), 1.0) / mean_blocks


def recompute_tail(prices: Prices, blocks: int, tail: int) -> float:
    """Seconds to compute the last `tail` of `blocks` blocks again."""
    tail = min(max(tail, 0), blocks)
    return prices.recompute((blocks - tail) * prices.page_size, tail * prices.page_size)


def places(case: Case, parameters: PricedParameters) -> list[Place]:
    """Where the blocks could go, cheapest first. Only what is allowed: it fits, and reloading it is
    faster than computing it."""
    prices, market, fresh = case.market.prices, case.market, case.uncopied
    queue = parameters.queue_weight * market.queue * case.urgency
    # What has a copy already comes back from there wherever the rest goes.
    copied = case.held - fresh
    known = min(prices.seconds(prices.load, copied), recompute_tail(prices, case.blocks - fresh, copied))
    recompute = recompute_tail(prices, case.blocks, fresh)
    drop = (known + recompute) * case.urgency + queue
    found = [Place(Choice.DROP, case.resume * drop, drop, 0.0)]
    save, write = prices.seconds(prices.save, fresh), prices.seconds(prices.write, fresh)
    load, fetch = prices.seconds(prices.load, fresh), prices.seconds(prices.fetch, fresh)
    visible = 1.0 - parameters.hidden

    def add(choice: Choice, reload: float, felt: float, rent: float, there: float) -> None:
        back = (known + reload) * case.urgency
        cost = felt + rent + case.resume * (back * visible + queue)
        found.append(Place(choice, cost, felt + back + queue, there + reload))

    if fresh <= market.host and (load < recompute or fresh == 0 < market.host):
        rent = case.host_price * fresh * case.remaining
        add(Choice.HOST, load, parameters.background * save, rent, save)
    if market.disk > 0 and 0 < fresh <= market.disk and fetch < recompute and market.host > 0:
        add(Choice.DISK, fetch, parameters.background * (save + write), 0.0, save + write)
    return sorted(found, key=lambda place: place.cost)


def insured(case: Case, parameters: PricedParameters) -> bool:
    """Whether a copy in the host slab is cheap enough to make before anything else is decided.

    While nobody needs the room, the chance that it is needed counts; once somebody does, all of it.
    """
    prices, market, fresh = case.market.prices, case.market, case.uncopied
    if not 0 < fresh <= market.host:  # of a full slab the least worthy go
        return False
    saved = recompute_tail(prices, case.blocks, fresh) - prices.seconds(prices.load, fresh)
    felt = parameters.background * prices.seconds(prices.save, fresh)
    chance = 1.0 if case.price > 0 else parameters.insurance
    return case.resume * chance * saved > felt


def let_go(market: Market, parameters: PricedParameters) -> float:
    """The chance that the host slab lets go of a block before it is wanted: the less is free the likelier."""
    if market.host <= 0:
        return 1.0
    short = 1.0 - market.host_free / (parameters.headroom * market.host)
    return min(max(short, parameters.insurance), 1.0)


def written_through(case: Case, blocks: int, parameters: PricedParameters) -> bool:
    """Whether `blocks` blocks that have a copy in the host slab should have one on disk too.

    The slab may have to let go of them. What that would cost is what computing takes longer than reading.
    """
    prices, market = case.market.prices, case.market
    if not 0 < blocks <= market.disk or market.host <= 0:
        return False
    saved = recompute_tail(prices, case.blocks, blocks) - prices.seconds(prices.fetch, blocks)
    return case.resume * let_go(market, parameters) * saved > parameters.background * prices.seconds(
        prices.write, blocks
    )


def reachable(case: Case, place: Place, parameters: PricedParameters) -> bool:
    """Whether the wait is likely to outlast the way there and back."""
    if place.round_trip <= 0:
        return True
    back = case.wait.conditional(case.elapsed, parameters.margin * place.round_trip)
    return 1.0 - back >= parameters.window


def hold_for(case: Case, below: Place, spent: float, parameters: PricedParameters) -> float:
    """For how many more seconds holding pays; 0: no longer.

    spent: what holding has cost in this wait. The best end by the expected wait, clamped so that in
    all it costs between `robustness` and 1 / `robustness` times what leaving costs at worst.
    """
    rate = case.price * case.held
    if rate <= 0:
        return math.inf
    least = (parameters.robustness * below.worst - spent) / rate
    most = (below.worst / parameters.robustness - spent) / rate
    if most <= 0:
        return 0.0
    best, gain = 0.0, 0.0
    steps = [most * HOLD_RATIO ** (step - HOLD_STEPS + 1) for step in range(HOLD_STEPS)]
    # A mode that is known to come (a fixed sleep, a hint, an oracle) is worth looking at exactly.
    steps.append(min(max((case.wait.quantile(0.5) - case.elapsed) * (1 + 1e-9), 0.0), most))
    for tau in sorted(steps):
        back = case.resume * case.wait.conditional(case.elapsed, tau)
        value = back * below.cost / max(case.resume, 1e-9)
        value -= rate * (1.0 - case.resume) * tau
        value -= rate * case.resume * case.wait.expected_hold(case.elapsed, tau)
        if value > gain:
            best, gain = tau, value
    return max(best, least, 0.0)


HOLD_STEPS = 12
HOLD_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Reload:
    """What bringing back would take."""

    blocks: int
    seconds: float
    recompute: float

    @property
    def pays(self) -> bool:
        return self.blocks > 0 and self.seconds < self.recompute


def reload_of(case: Case) -> Reload:
    """Bringing the session's blocks in lower tiers back onto the device."""
    prices, residency = case.market.prices, case.residency
    blocks = residency.host + residency.disk
    seconds = prices.seconds(prices.load, residency.host) + prices.seconds(prices.fetch, residency.disk)
    start = residency.device * prices.page_size
    return Reload(blocks, seconds, prices.recompute(start, blocks * prices.page_size))


def affordable(case: Case, reload: Reload, spent: float, parameters: PricedParameters) -> bool:
    """Whether this wait has not yet cost in holding what waiting for the reload would cost by far."""
    queue = parameters.queue_weight * case.market.queue
    most = (reload.seconds + queue) * case.urgency / parameters.robustness
    return spent + case.price * reload.blocks * reload.seconds <= most


def chance_wanted(case: Case, reload: Reload, parameters: PricedParameters) -> float:
    """The newsvendor's fraction: restore once the chance of a return within the reload's time is so large.

    Too early costs the price of its blocks, too late costs the client's seconds.
    """
    early = case.price * reload.blocks
    late = parameters.late * case.urgency * case.resume
    return max(early / (early + late), parameters.early) if early + late > 0 else 1.0


def restore_in(wait: Wait, elapsed: float, seconds: float, chance: float) -> float:
    """How many seconds from now P(W <= t + seconds | W > t) first reaches `chance`; inf: never."""
    if wait.conditional(elapsed, seconds) >= chance:
        return 0.0
    times = {wait.quantile(q / 20) - seconds for q in range(1, 20)}
    last = wait.quantile(0.999)
    times.update(elapsed + (last - elapsed) * 0.5**step for step in range(12))
    for t in sorted(times):
        if t > elapsed and wait.conditional(t, seconds * (1 + 1e-9)) >= chance:
            return t - elapsed
    return math.inf


def loss(case: Case, tier: Tier, parameters: PricedParameters) -> tuple[float, int]:
    """Seconds that the session would lose by losing its blocks in `tier`, and how many these are at most."""
    prices, residency = case.market.prices, case.residency
    if tier is Tier.DEVICE:
        n = residency.device
        reload = recompute_tail(prices, case.blocks, n)
        if residency.copied >= n:
            reload = min(reload, prices.seconds(prices.load, n))
        return reload, n
    above = residency.host + residency.copied
    n = above if tier is Tier.HOST else above + residency.disk
    fast = prices.seconds(prices.load if tier is Tier.HOST else prices.fetch, n)
    lost = max(recompute_tail(prices, case.blocks, n) - fast, 0.0)
    if tier is Tier.DISK and n > 0:
        # What is also above is missed only if that goes first; at no worth it would be dropped, and written
        # again as soon as its session rests.
        lost *= (residency.disk + let_go(case.market, parameters) * above) / n
    return lost, n


def return_rate(wait: Wait, elapsed: float) -> float:
    """How fast a session comes back, per second of being kept: max over t of P(W <= t) / E[min(W, t)].

    1 / E[W] for a wait without surprises. Where most come back at once and a few after hours, the mean
    says nothing about either; stopping at the best t does (the index of Gittins, 1979, for one that may
    be given up at any time).
    """
    best = 0.0
    for tau in (0.1, 1.0, 10.0, 100.0, HORIZON):
        held = max(wait.expected_hold(elapsed, tau), 1e-3)
        best = max(best, wait.conditional(elapsed, tau) / held)
    return best


def density(case: Case, tier: Tier, parameters: PricedParameters, rate: float | None = None) -> float:
    """Value of one block of the session in `tier`: p x (reload + queue) x return rate / blocks.

    rate: `return_rate` of its wait, if it is known already.
    """
    lost, n = loss(case, tier, parameters)
    if n <= 0:
        return 0.0
    queue = parameters.queue_weight * case.market.queue if tier is Tier.DEVICE else 0.0
    if rate is None:
        rate = return_rate(case.wait, case.elapsed)
    return case.resume * case.urgency * (lost + queue) * rate / n
