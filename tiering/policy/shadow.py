"""Two policies side by side without any KV: what each would have cost, by keys alone.

A `ShadowTiers` follows sessions through tiers of the real sizes as one policy would place them, and
charges what a session lacks when it comes back, at the real prices. Both shadows use the same
simplifications (a session's private blocks only, copies take no time, running sessions are never
taken from), so their costs can be compared whichever policy leads in fact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiering.policy.base import Choice, Market, Prices, Residency
from tiering.policy.valuation import recompute_tail
from tiering.types import Tier

EXAMINED = 32  # resting sessions looked at per victim: the least of a rotating sample goes

Value = Callable[[str, Tier, Residency], float]


@dataclass(slots=True)
class _Kept:
    """A session's private blocks. In every tier it has its first ones, so many of them."""

    blocks: int
    device: int = 0
    host: int = 0
    disk: int = 0
    running: bool = False
    dropped: bool = False

    def residency(self) -> Residency:
        below = max(self.host, self.disk)
        host = max(self.host - self.device, 0)
        disk = max(self.disk - max(self.device, self.host), 0)
        gone = self.blocks - self.device - host - disk
        return Residency(self.device, host, disk, gone, min(self.device, below))

    def missing(self, prices: Prices) -> float:
        """Seconds to have all of it on the device, each part the cheaper way."""
        rest = self.residency()
        end, seconds = self.device, 0.0
        for blocks, line in ((rest.host, prices.load), (rest.disk, prices.fetch)):
            end += blocks
            seconds += min(prices.seconds(line, blocks), recompute_tail(prices, end, blocks))
        return seconds + recompute_tail(prices, self.blocks, rest.gone)


class ShadowTiers:
    """value: what a session's block is worth in a tier; None: least recently used goes first."""

    def __init__(self, value: Value | None = None) -> None:
        self._value = value
        self._kept: dict[str, _Kept] = {}  # least recently touched first
        self._used = {Tier.DEVICE: 0, Tier.HOST: 0, Tier.DISK: 0}
        self._turn = 0

    def parked(self, session: str, blocks: int, market: Market) -> None:
        old = self._kept.pop(session, None) or _Kept(0)
        self._use(old, -1)
        # Blocks have one content for ever: copies that were made are copies of the longer session's start.
        new = _Kept(blocks, min(old.device, blocks), min(old.host, blocks), min(old.disk, blocks))
        self._kept[session] = new
        self._use(new, 1)
        self._bring(session, market)

    def place(self, session: str, choice: Choice, market: Market) -> None:
        """What the policy decided about a session at rest."""
        kept = self._kept.get(session)
        if kept is None or kept.running:
            return
        kept.dropped = choice is Choice.DROP
        if choice is Choice.RESTORE:
            if max(kept.host, kept.disk) > kept.device:
                self._bring(session, market)
        elif choice in (Choice.HOST, Choice.DISK) and kept.device == kept.blocks:
            extra = kept.blocks - kept.host
            if self._room(Tier.HOST, extra, market, session):
                self._used[Tier.HOST] += extra
                kept.host = kept.blocks
            extra = kept.blocks - kept.disk
            if choice is Choice.DISK and self._room(Tier.DISK, extra, market, session):
                self._used[Tier.DISK] += extra
                kept.disk = kept.blocks

    def resumed(self, session: str, market: Market) -> float:
        """Seconds that it lost: the cheaper of reloading and computing what was not on the device."""
        kept = self._kept.pop(session, None)
        if kept is None:
            return 0.0
        self._kept[session] = kept
        seconds = kept.missing(market.prices)
        self._bring(session, market)
        kept.running, kept.dropped = True, False
        return seconds

    def finished(self, session: str) -> None:
        self._remove(session)

    def residency(self, session: str) -> Residency | None:
        kept = self._kept.get(session)
        return None if kept is None else kept.residency()

    def used(self, tier: Tier) -> int:
        return self._used[tier]

    # --- inside ------------------------------------------------------------------------------

    def _bring(self, session: str, market: Market) -> None:
        """All of it onto the device; it is the last to be touched."""
        kept = self._kept[session]
        self._room(Tier.DEVICE, kept.blocks - kept.device, market, session)
        self._used[Tier.DEVICE] += kept.blocks - kept.device
        kept.device = kept.blocks

    def _room(self, tier: Tier, blocks: int, market: Market, but: str) -> bool:
        size = {Tier.DEVICE: market.device, Tier.HOST: market.host, Tier.DISK: market.disk}[tier]
        if tier is not Tier.DEVICE and blocks > size:
            return False  # nobody is pushed out for what does not fit
        while self._used[tier] + blocks > size:
            victim = self._victim(tier, but)
            if victim is None:
                return False
            self._take(victim, tier, self._used[tier] + blocks - size)
        return True

    def _take(self, session: str, tier: Tier, blocks: int) -> None:
        """Tail blocks go as needed."""
        kept = self._kept[session]
        if tier is Tier.DEVICE:
            lost = min(blocks, kept.device)
            kept.device -= lost
        elif tier is Tier.HOST:
            lost = min(blocks, kept.host)
            kept.host -= lost
        else:
            lost = min(blocks, kept.disk)
            kept.disk -= lost
        self._used[tier] -= lost

    def _victim(self, tier: Tier, but: str) -> str | None:
        candidates = self._candidates(tier, but)
        if self._value is None:
            return next(candidates, None)
        worst, least = None, 0.0
        for session in self._sampled(candidates):
            kept = self._kept[session]
            value = -1.0 if kept.dropped else self._value(session, tier, kept.residency())
            if worst is None or value < least:
                worst, least = session, value
        return worst

    def _candidates(self, tier: Tier, but: str) -> Iterator[str]:
        for session, kept in self._kept.items():
            if session == but:
                continue
            if tier is Tier.DEVICE:
                if kept.device > 0 and not kept.running:
                    yield session
            elif (kept.host if tier is Tier.HOST else kept.disk) > 0:
                yield session

    def _sampled(self, candidates: Iterator[str]) -> list[str]:
        """The oldest half of a sample, and as many more from a place that moves on with each call."""
        every = list(candidates)
        if len(every) <= EXAMINED:
            return every
        half = EXAMINED // 2
        self._turn = (self._turn + half) % len(every)
        return every[:half] + [every[(self._turn + i) % len(every)] for i in range(half)]

    def _remove(self, session: str) -> None:
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._use(kept, -1)

    def _use(self, kept: _Kept, sign: int) -> None:
        self._used[Tier.DEVICE] += sign * kept.device
        self._used[Tier.HOST] += sign * kept.host
        self._used[Tier.DISK] += sign * kept.disk


class Race:
    """Which of two costs was lower over the last `turns` turns. The first leads until it is behind."""

    def __init__(self, turns: int, lead: float) -> None:
        self._costs: deque[tuple[float, float]] = deque(maxlen=turns)
        self._sums = [0.0, 0.0]
        self._lead = lead
        self.second_leads = False
        self.takeovers = 0  # times that the second came to lead

    def ran(self, first: float, second: float) -> None:
        if len(self._costs) == self._costs.maxlen:
            old = self._costs[0]
            self._sums[0] -= old[0]
            self._sums[1] -= old[1]
        self._costs.append((first, second))
        self._sums[0] += first
        self._sums[1] += second
        ours, theirs = self._sums
        if self.second_leads:
            self.second_leads = ours > theirs + 1e-9
        elif ours > theirs * (1.0 + self._lead) + 1e-9:
            self.second_leads = True
            self.takeovers += 1

    @property
    def sums(self) -> tuple[float, float]:
        return max(self._sums[0], 0.0), max(self._sums[1], 0.0)
