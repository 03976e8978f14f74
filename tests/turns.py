"""Sessions with a turn that waits, without a core around them."""

from __future__ import annotations

from array import array
from itertools import count

from agentserve.core.session import Session, Turn
from agentserve.types import NO_SLO, Sampling, SessionId, Slo, TurnId

_arrivals = count()


def waiting(name: str, *, arrived: float = 0.0, slo: Slo = NO_SLO, relegated: bool = False) -> Session:
    """Each stands behind those made before it."""
    tokens = array("i", [1, 2, 3])
    turn = Turn(
        TurnId(1), 3, Sampling(), 10, (0, next(_arrivals)), arrived, tokens, slo=slo, relegated=relegated
    )
    return Session(SessionId(name), tokens=tokens, turn=turn)
