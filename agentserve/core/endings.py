"""When a turn is over by what it said."""

from __future__ import annotations

from collections.abc import Set

from agentserve.core.plan import Sampled
from agentserve.core.session import Session, Turn
from agentserve.types import FinishReason


def reason_to_end(session: Session, turn: Turn, sampled: Sampled, ends: Set[int]) -> FinishReason | None:
    """After `sampled` was appended; None: it goes on. ends: tokens that end any turn."""
    sampling, generated = turn.sampling, session.generated
    if generated >= sampling.min_tokens:
        if sampled.token in sampling.stop_token_ids:
            return FinishReason.STOP
        if sampled.token in ends and not sampling.ignore_eos:
            return FinishReason.STOP
    if sampled.ended:
        return FinishReason.STOP
    if generated >= sampling.max_tokens or len(session.tokens) >= turn.limit:
        return FinishReason.LENGTH
    return None
