"""InferCept (ICML 2024, arXiv 2402.01869): minimise memory that is held unused, in token-seconds.

    preserve = T_int x C                 with the time still to come taken to be the time so far
    discard  = T_fwd(C) x C / 2 + k x T_fwd(C / k) x C_other      recomputed in k chunks
    swap     = nothing, within a budget of what hides behind forward passes

Its equations 1 to 5, as its notes and its code agree. Sessions are swapped out while the budget lasts;
the rest are preserved or discarded, whichever wastes less. Swapped-out KV comes back when the session
does. Queues are first come, first served by a session's *first* arrival. `heuristic` is the ablation
H-B of its code: preserve below 4 s, swap below 7 s, else discard, by the mean of the tool so far, or by
the elapsed time where there is none.

What differs: the paper sorts all paused sessions by waste in each iteration; here each is asked about
alone, so the budget goes to who is asked first.
"""

from __future__ import annotations

import math

import msgspec

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Prices, Residency, Signal
from tiering.policy.known_sessions import Entry, KnownSessions
from tiering.types import Tier
from tiering.waits import name_of

MOST_TOOLS = 256


class InferCeptParameters(msgspec.Struct, frozen=True):
    heuristic: bool = False
    saturation: int = 384  # query tokens that saturate a step (its code's S)
    preserve_below: float = 4.0  # seconds (H-B)
    swap_below: float = 7.0
    step_seconds: float = 0.05  # a forward pass behind which swapping hides


def preserve_waste(elapsed: float, context: int) -> float:
    """Token-seconds of keeping `context` tokens for as long again as they have been kept."""
    return elapsed * context


def discard_waste(prices: Prices, context: int, others: int, saturation: int) -> float:
    """Token-seconds of computing `context` tokens again in chunks while `others` tokens stand by."""
    if context <= 0:
        return 0.0
    chunks = -(-context // saturation)
    each = prices.recompute(0, -(-context // chunks))
    return prices.recompute(0, context) * context / 2 + chunks * each * others


class InferCeptPolicy:
    name = "infercept"
    eager = False

    def __init__(self, parameters: InferCeptParameters | None = None) -> None:
        self.parameters = parameters or InferCeptParameters()
        self._known = KnownSessions()
        self._means: dict[str, tuple[int, float]] = {}  # tool -> (waits, mean)
        self._budget = 0.0  # blocks that may be swapped now
        self._filled = -math.inf

    def parked(self, park: Park) -> None:
        self._known.parked(park)

    def resumed(self, session: str, at: float, waited: float) -> None:
        entry = self._known.resumed(session, at)
        if entry is not None and entry.park.tools:
            name = _name(entry.park)
            count, mean = self._means.pop(name, (0, 0.0))
            self._means[name] = (count + 1, mean + (waited - mean) / (count + 1))
            while len(self._means) > MOST_TOOLS:
                del self._means[next(iter(self._means))]

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        pass

    def gone(self, session: str, at: float, why: Departure) -> None:
        self._known.gone(session, why)

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        entry = self._known.at_rest(session)
        if entry is None:
            return Decision(Choice.DROP, math.inf, "unknown")
        if self.parameters.heuristic:
            return self._by_thresholds(entry, residency, market)
        return self._by_waste(entry, residency, market)

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        """Who wastes most goes first; running sessions and strangers by recency, before nobody."""
        entry = self._known.get(session)
        if entry is None:
            return -math.inf
        return -preserve_waste(market.now - entry.park.at, entry.park.tokens) if entry.resting else 0.0

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        entry = self._known.get(session)
        return (entry.park.program if entry is not None else arrived,)

    def _by_waste(self, entry: Entry, residency: Residency, market: Market) -> Decision:
        now, park, p = market.now, entry.park, self.parameters
        elapsed, context = max(now - park.at, 0.0), park.private * market.prices.page_size
        if market.host > 0 and self._swap(residency.device - residency.copied, market):
            return Decision(Choice.HOST, math.inf, "swapped within the budget")
        others = max((market.device - market.device_free) * market.prices.page_size - context, 0)
        discard = discard_waste(market.prices, context, others, p.saturation)
        if preserve_waste(elapsed, context) <= discard:
            even = discard / max(context, 1) - elapsed
            again = p.step_seconds if market.host_free > 0 else math.inf
            return Decision(Choice.HOLD, now + max(min(even, again), 1e-3), "preserving wastes less")
        return Decision(Choice.DROP, math.inf, "discarding wastes less")

    def _by_thresholds(self, entry: Entry, residency: Residency, market: Market) -> Decision:
        p, at, now = self.parameters, entry.park.at, market.now
        known = self._means.get(_name(entry.park))
        wait = known[1] if known is not None else now - at
        if wait < p.preserve_below:
            until = math.inf if known is not None else at + p.preserve_below
            return Decision(Choice.HOLD, until, "a short call")
        if wait < p.swap_below and market.host > 0:
            until = math.inf if known is not None else at + p.swap_below
            return Decision(Choice.HOST, until, "a call of some seconds")
        return Decision(Choice.DROP, math.inf, "a long call")

    def _swap(self, blocks: int, market: Market) -> bool:
        """Take `blocks` from the budget; a session larger than the budget ever is takes all of it."""
        per_block = max(market.prices.save[1], 1e-9)
        most = self.parameters.step_seconds / per_block
        self._budget = min(self._budget + (market.now - self._filled) / per_block, most)
        self._filled = market.now
        if blocks > market.host_free or min(blocks, most) > self._budget:
            return False
        self._budget -= min(blocks, most)
        return True


def _name(park: Park) -> str:
    """Under which a wait is learned: what a tenant's tools take is its own."""
    return f"{park.tenant} {name_of(park.tools)}"
