"""Parks, markets and a game of one session against fixed prices, for the tests of policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tiering.policy.base import Choice, Hints, Market, Park, Policy, Prices, Residency, Rest, Signal

PRICES = Prices(
    block_bytes=1 << 20,
    save=(0.001, 0.0005),
    load=(0.001, 0.0005),
    write=(0.005, 0.002),
    fetch=(0.005, 0.001),
    prefill=(0.01, 0.001, 0.0),
    page_size=16,
)


NO_HINTS = Hints()


def park(session: str = "s", at: float = 0.0, blocks: int = 100, *, tools: tuple[str, ...] = ("t",),
         turn: int = 1, rest: Rest = Rest.TOOL, hints: Hints = NO_HINTS, private: int | None = None,
         program: float = 0.0, service: float = 0.0) -> Park:  # fmt: skip
    own = blocks if private is None else private
    return Park(session, at, rest, turn, tools, blocks * 16, blocks, own, program, service, hints)


def market(now: float = 0.0, *, device: int = 1000, device_free: int = 0, demand: int = 0, waiting: int = 0,
           queue: float = 0.0, host: int = 10_000, host_free: int | None = None, disk: int = 0,
           prices: Prices = PRICES) -> Market:  # fmt: skip
    free = host if host_free is None else host_free
    return Market(now, device, device_free, demand, waiting, queue, host, free, disk, disk, 1, prices)


def on_device(blocks: int = 100, copied: int = 0) -> Residency:
    return Residency(blocks, 0, 0, 0, copied)


def in_host(blocks: int = 100) -> Residency:
    return Residency(0, blocks, 0, 0)


@dataclass(frozen=True)
class Heard:
    at: float
    signal: Signal
    hints: Hints = NO_HINTS


@dataclass
class Game:
    """What one wait costs at prices that stay: holding, moving, and what is missing at its end.

    As the policy's own model counts: a copy costs `background` of its seconds; a load costs all of its.
    """

    policy: Policy
    market: Market
    rate: float  # seconds lost per second by holding
    background: float
    queue: float  # lost by a session that is not on the device when it comes back
    blocks: int = 100
    moves: int = 0
    now: float = 0.0  # when the policy was last asked

    def play(self, wait: float, hints: Hints, heard: Sequence[Heard] = ()) -> float:
        self.policy.parked(park(blocks=self.blocks, hints=hints))
        now, cost, where, copied = 0.0, 0.0, Choice.HOLD, False
        news = sorted(heard, key=lambda item: item.at)
        for _ in range(10_000):
            decision = self.policy.decide("s", self._residency(where, copied), self._at(now))
            assert decision.until > now, decision
            moved, where, copied = self._move(decision.choice, where, copied)
            end = min(decision.until, wait, news[0].at if news else math.inf)
            cost += moved + (self.rate * (end - now) if where is Choice.HOLD else 0.0)
            now = end
            if now >= wait:
                break
            while news and news[0].at <= now:
                item = news.pop(0)
                self.policy.signalled("s", item.signal, now, item.hints)
        else:
            raise AssertionError("the policy asks to be asked for ever")
        self.policy.resumed("s", now, wait)
        return cost + self._missing(where)

    def _at(self, now: float) -> Market:
        m, self.now = self.market, now
        return Market(now, m.device, m.device_free, m.demand, m.waiting, m.queue, m.host, m.host_free, m.disk,
                      m.disk_free, m.parked, m.prices)  # fmt: skip

    def _residency(self, where: Choice, copied: bool) -> Residency:
        n = self.blocks
        if where is Choice.HOLD:
            return Residency(n, 0, 0, 0, n if copied else 0)
        return Residency(
            0, *(n if where is place else 0 for place in (Choice.HOST, Choice.DISK, Choice.DROP))
        )

    def _move(self, choice: Choice, where: Choice, copied: bool) -> tuple[float, Choice, bool]:
        prices, n = self.market.prices, self.blocks
        if choice is Choice.RESTORE:
            self.moves += 1
            return prices.seconds(prices.load, n), Choice.HOLD, True
        if where is not Choice.HOLD or choice is Choice.HOLD:
            return 0.0, where, copied
        seconds = 0.0
        if choice is not Choice.DROP and not copied:
            seconds += prices.seconds(prices.save, n)
            seconds += prices.seconds(prices.write, n) if choice is Choice.DISK else 0.0
        return self.background * seconds, choice, copied or choice is not Choice.DROP

    def _missing(self, where: Choice) -> float:
        prices, n = self.market.prices, self.blocks
        if where is Choice.HOLD:
            return 0.0
        reload = {
            Choice.HOST: prices.seconds(prices.load, n),
            Choice.DISK: prices.seconds(prices.fetch, n),
            Choice.DROP: prices.recompute(0, n * 16),
        }[where]
        return reload + self.queue
