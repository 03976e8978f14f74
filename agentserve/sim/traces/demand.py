"""How many agents at once ask for how much KV: agents played against a server that only takes its time."""

from __future__ import annotations

import heapq
from functools import lru_cache

from agentserve.messages import Submit, TurnEnded, TurnUsage
from agentserve.sim.traces.draw import TraceSpec
from agentserve.sim.traces.players import Players
from agentserve.types import FinishReason
from tiering.policy.base import Hints

TURNS = 600  # turns that are played to see the demand
SERVICE = 1.0  # seconds that each takes here


@lru_cache(maxsize=64)
def live_tokens(spec: TraceSpec, lanes: int) -> float:
    """Tokens of all contexts alive, averaged over time, with turns that take `SERVICE` seconds each."""
    players = Players(spec, lanes, 2, lambda raw, now: Hints())
    running: list[tuple[float, int, Submit]] = []  # (ends, tie-break, turn)
    now, area, began, ended = 0.0, 0.0, 0, 0
    while ended < TURNS + 4 * lanes:
        for command in players.due(now):
            if isinstance(command, Submit):
                began += 1
                heapq.heappush(running, (now + SERVICE, began, command))
        due = players.next_due()
        later = min(when for when in (due, running[0][0] if running else None) if when is not None)
        area += players.live_tokens * (max(later, now) - now)
        now = max(later, now)
        while running and running[0][0] <= now:
            when, _, submit = heapq.heappop(running)
            usage = TurnUsage(len(submit.tokens) // 4, 0, 0, 0, 0, when, when, when, when)
            players.heard(TurnEnded(submit.session, submit.turn, FinishReason.LENGTH, usage), now)
            ended += 1
    return area / now


def lanes_for(spec: TraceSpec, tokens: float) -> int:
    """So many agents at once that their contexts come to about `tokens`: a secant through the origin,
    taken twice, since bursts leave a larger share of few lanes empty than of many."""
    lanes = max(1, round(tokens / (live_tokens(spec, 8) / 8)))
    return max(1, round(lanes * tokens / live_tokens(spec, lanes)))
