"""MORI (arXiv 2606.00866): place programs by how idle they are.

Idleness = time acting / (time reasoning + time acting) over the last k = 5 cycles; what the scheduler
makes a program wait is in neither. The busiest programs have the device, the most idle host memory, what
is left over is dropped. Placement is sticky: a program moves only when a capacity is crossed; the most
idle is demoted first, acting ones before reasoning ones, the least idle promoted first. Eviction is by
type: the device evicts inactive, then idle, then busy blocks; the host inactive, then busy, then idle.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Signal
from tiering.policy.known_sessions import Entry, KnownSessions
from tiering.types import Tier

LABEL = 1e12  # beyond any time: the type of a block counts before its recency


class MoriParameters(msgspec.Struct, frozen=True):
    cycles: int = 5  # k
    round_seconds: float = 5.0  # of ThunderAgent, on which it is built
    forced: float = 1800.0  # seconds after which a program without a place stops standing behind


@dataclass(slots=True)
class _Program:
    cycles: deque[tuple[float, float]]  # (acting, reasoning) seconds
    service: float = 0.0  # when it last came to rest
    reasoned: float = 0.0  # in the turn before the wait that goes on
    place: Tier | None = Tier.DEVICE
    placeless: float = field(default=math.inf)  # since when it has none

    @property
    def idleness(self) -> float:
        """Of a program without a cycle: it counts as busy."""
        acting = sum(cycle[0] for cycle in self.cycles)
        total = acting + sum(cycle[1] for cycle in self.cycles)
        return acting / total if total > 0 else 0.0


class MoriPolicy:
    name = "mori"
    eager = False

    def __init__(self, parameters: MoriParameters | None = None) -> None:
        self.parameters = parameters or MoriParameters()
        self._known = KnownSessions()
        self._programs: dict[str, _Program] = {}
        self._round = -math.inf

    def idleness(self, session: str) -> float:
        program = self._programs.get(session)
        return program.idleness if program is not None else 0.0

    def parked(self, park: Park) -> None:
        forgotten = self._known.parked(park)
        if forgotten is not None:
            self._programs.pop(forgotten, None)
        program = self._programs.get(park.session)
        if program is None:
            program = self._programs[park.session] = _Program(deque(maxlen=self.parameters.cycles))
        program.reasoned = max(park.service - program.service, 0.0)
        program.service = park.service

    def resumed(self, session: str, at: float, waited: float) -> None:
        self._known.resumed(session, at)
        program = self._programs.get(session)
        if program is not None and 0 <= waited < math.inf:
            program.cycles.append((waited, program.reasoned))

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        pass

    def gone(self, session: str, at: float, why: Departure) -> None:
        self._known.gone(session, why)
        if why is Departure.FINISHED:
            self._programs.pop(session, None)

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        entry, program = self._known.at_rest(session), self._programs.get(session)
        if entry is None or program is None:
            return Decision(Choice.DROP, math.inf, "unknown")
        if entry.gone is not None:
            return Decision(Choice.DROP, math.inf, "inactive")
        self._rounds(market)
        until = self._round + self.parameters.round_seconds
        reason = f"idleness {program.idleness:.2f}"
        if program.place is Tier.HOST:
            return Decision(Choice.HOST, until, reason)
        if program.place is None:
            return Decision(Choice.DROP, until, reason)
        below = residency.host + residency.disk
        back = below > 0 and market.device_free - market.demand >= below
        return Decision(Choice.RESTORE if back else Choice.HOLD, until, reason)

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        entry, program = self._known.get(session), self._programs.get(session)
        if entry is None or program is None:
            return -math.inf
        if entry.gone is not None or program.place is None:
            label = 0  # inactive
        elif tier is Tier.DEVICE:
            label = 2 if program.place is Tier.DEVICE else 1
        else:
            label = 1 if program.place is Tier.DEVICE else 2
        return label * LABEL + entry.touched

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        """Programs without a place wait behind the others, the least idle first."""
        program = self._programs.get(session)
        if program is None or program.place is not None:
            return (0.0, arrived)
        if market.now - program.placeless >= self.parameters.forced:
            return (0.0, arrived)
        return (1.0, program.idleness, arrived)

    def _rounds(self, market: Market) -> None:
        if market.now < self._round + self.parameters.round_seconds:
            return
        self._round = market.now
        everybody = [
            (self._programs[session], entry)
            for session, entry in self._known.entries()
            if entry.gone is None and session in self._programs
        ]
        # Most idle first; of the acting and the reasoning the acting.
        everybody.sort(key=lambda item: (item[1].resting, item[0].idleness), reverse=True)
        used = {tier: sum(e.park.blocks for p, e in everybody if p.place is tier) for tier in Tier}
        size = {Tier.DEVICE: market.device, Tier.HOST: market.host}
        self._demote(everybody, used, size, market.now)
        self._promote(everybody, used, size)

    def _demote(
        self,
        everybody: list[tuple[_Program, Entry]],
        used: dict[Tier, int],
        size: dict[Tier, int],
        now: float,
    ) -> None:
        lower: tuple[tuple[Tier, Tier | None], ...] = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, None))
        for tier, below in lower:
            # The device sends its most idle away; the host, whose most idle fit it best, its busiest.
            order = everybody if tier is Tier.DEVICE else everybody[::-1]
            for program, entry in order:
                if used[tier] <= size[tier]:
                    break
                if program.place is tier:
                    used[tier] -= entry.park.blocks
                    program.place, program.placeless = below, now
                    if below is not None:
                        used[below] += entry.park.blocks

    def _promote(
        self, everybody: list[tuple[_Program, Entry]], used: dict[Tier, int], size: dict[Tier, int]
    ) -> None:
        for program, entry in reversed(everybody):  # least idle first
            blocks = entry.park.blocks
            if program.place is not Tier.DEVICE and used[Tier.DEVICE] + blocks <= size[Tier.DEVICE]:
                if program.place is not None:
                    used[program.place] -= blocks
                used[Tier.DEVICE] += blocks
                program.place = Tier.DEVICE
            elif program.place is None and used[Tier.HOST] + blocks <= size[Tier.HOST]:
                used[Tier.HOST] += blocks
                program.place = Tier.HOST
