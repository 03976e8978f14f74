"""What the turns that run add up to, before a step is planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentserve.core.cost import StepCost
from agentserve.core.scheduling.forecast import NOTHING, Work
from agentserve.core.session import Session, Turn
from agentserve.core.timing.tally import Attention, Tally


@dataclass(slots=True)
class Load:
    """The turns that run."""

    least: float = 0.0  # seconds of a step without prompts
    decodes: int = 0
    beat: float = math.inf  # the shortest time per token that was promised to one of them
    dues: list[float] = field(default_factory=list)  # of their next tokens, where something was promised
    begun: list[tuple[float, Work]] = field(default_factory=list)  # prompts, with when each should be read

    def before(self, moment: float) -> Work:
        """Prompts that are being read, as far as they go before one that should be read at that moment."""
        return sum((work for due, work in self.begun if due <= moment), NOTHING)


def load_of_running(
    running: Sequence[Session], cost: StepCost, attention: Attention, due: Callable[[Turn, float], float]
) -> Load:
    """One pass over the turns that run: there are hundreds, at every step. due: when a turn's prompt, which
    takes so many seconds, should be read."""
    load = Load()
    lengths, picked = [], 0
    for session in running:
        turn, computed, length = session.running_turn, session.computed, len(session.tokens)
        lag = length - computed
        if lag > 1:
            takes = cost.chunk(computed, lag)
            load.begun.append((due(turn, takes), Work(lag, takes)))
            continue
        load.decodes += 1
        lengths.append(computed)
        picked += turn.picks
        if turn.beat < math.inf or turn.gap < math.inf:
            load.beat = min(load.beat, turn.beat, turn.gap)
            if turn.first_token:
                load.dues.append(turn.next_due(length - turn.prompt - turn.given))
    tally = Tally(attention)
    tally.decodes_of(load.decodes, attention.seen_by(lengths), picked)
    load.least = cost.predict(tally.load())
    return load
