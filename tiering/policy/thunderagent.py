"""ThunderAgent (arXiv 2602.13692): every 5 s, pause programs that do not fit and restore those that do.

A program reasons (it runs or wants to) or acts (it waits on a tool). Active programs whose tokens exceed
the capacity are paused by the highest 1 / tokens + [acts]: acting ones first, the shortest first, for
recomputing costs about the square of the length. Paused ones are restored by the highest 1 / tokens +
[reasons] while they fit, where the tokens of an acting program count 2^-t after t seconds. In each round
restoring comes before pausing; each active program reserves 100 tokens; who has been paused for 1,800 s
is restored anyway. Constants of its code. Paused KV is dropped, or with `offload` (the stronger baseline
of MORI, arXiv 2606.00866) goes to host memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Signal
from tiering.policy.known_sessions import Entry, KnownSessions
from tiering.types import Tier


class ThunderAgentParameters(msgspec.Struct, frozen=True):
    round_seconds: float = 5.0
    buffer: int = 100  # tokens reserved per active program
    half_life: float = 1.0  # seconds in which an acting program's tokens halve, on the restoring side
    forced: float = 1800.0  # seconds after which a paused program is restored
    offload: bool = False


def pause_score(tokens: int, acting: bool) -> float:
    return 1.0 / max(tokens, 1) + acting


def restore_score(tokens: int, reasoning: bool) -> float:
    return 1.0 / max(tokens, 1) + reasoning


def decayed(tokens: int, acted: float, half_life: float) -> float:
    """What an acting program's tokens count after `acted` seconds."""
    return float(tokens * 2.0 ** -(max(acted, 0.0) / half_life))


@dataclass(slots=True)
class _Paused:
    since: float


class ThunderAgentPolicy:
    name = "thunderagent"
    eager = False

    def __init__(self, parameters: ThunderAgentParameters | None = None) -> None:
        self.parameters = parameters or ThunderAgentParameters()
        self._known = KnownSessions()
        self._paused: dict[str, _Paused] = {}
        self._round = -math.inf

    @property
    def paused(self) -> tuple[str, ...]:
        return tuple(self._paused)

    def parked(self, park: Park) -> None:
        forgotten = self._known.parked(park)
        if forgotten is not None:
            self._paused.pop(forgotten, None)

    def resumed(self, session: str, at: float, waited: float) -> None:
        self._known.resumed(session, at)

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        pass

    def gone(self, session: str, at: float, why: Departure) -> None:
        self._known.gone(session, why)
        if why is Departure.FINISHED:
            self._paused.pop(session, None)

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        entry = self._known.at_rest(session)
        if entry is None:
            return Decision(Choice.DROP, math.inf, "unknown")
        self._rounds(market)
        until = self._round + self.parameters.round_seconds
        if session not in self._paused:
            return Decision(Choice.HOLD, until, "active")
        below = self.parameters.offload and market.host > 0
        return Decision(Choice.HOST if below else Choice.DROP, until, "paused")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        entry = self._known.get(session)
        if entry is None:
            return -math.inf
        return 0.0 if session in self._paused else entry.touched

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        """Paused programs stand behind, until a round restores them (after 1,800 s at the latest)."""
        self._rounds(market)
        entry = self._known.get(session)
        if entry is None or session not in self._paused:
            return (0.0, arrived)
        return (1.0, float(entry.park.tokens), arrived)

    def _rounds(self, market: Market) -> None:
        if market.now < self._round + self.parameters.round_seconds:
            return
        self._round = market.now
        self._restore(market)
        self._pause(market)

    def _restore(self, market: Market) -> None:
        p, now = self.parameters, market.now
        for session, paused in tuple(self._paused.items()):
            if now - paused.since >= p.forced or self._known.get(session) is None:
                del self._paused[session]
        used, capacity = 0.0, float(market.device * market.prices.page_size)
        for _, entry in self._active():
            acted = now - entry.park.at
            tokens = entry.park.tokens
            used += p.buffer + (decayed(tokens, acted, p.half_life) if entry.resting else tokens)
        waiting = [item for item in self._known.entries() if item[0] in self._paused]
        waiting.sort(key=lambda item: -restore_score(item[1].park.tokens, not item[1].resting))
        for session, entry in waiting:
            wanted = entry.park.tokens + p.buffer
            if used + wanted <= capacity:
                used += wanted
                del self._paused[session]

    def _pause(self, market: Market) -> None:
        active = self._active()
        used = sum(entry.park.tokens + self.parameters.buffer for _, entry in active)
        capacity = market.device * market.prices.page_size
        active.sort(key=lambda item: -pause_score(item[1].park.tokens, item[1].resting))
        for session, entry in active:
            if used <= capacity:
                break
            used -= entry.park.tokens + self.parameters.buffer
            self._paused[session] = _Paused(market.now)

    def _active(self) -> list[tuple[str, Entry]]:
        return [
            (session, entry)
            for session, entry in self._known.entries()
            if session not in self._paused and entry.gone is None
        ]
