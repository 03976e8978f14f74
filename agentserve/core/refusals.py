"""Why a turn is not begun: it can never run, or the queue cannot keep what was promised for it."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from agentserve.core.config import CoreConfig
from agentserve.core.kv import KVManager
from agentserve.core.radix import common_prefix
from agentserve.core.scheduler import Scheduler
from agentserve.core.scheduling.deadlines import first_due
from agentserve.core.session import Session
from agentserve.core.tiers import Tiers
from agentserve.core.timekeeper import Newcomer
from agentserve.messages import Submit
from agentserve.types import FinishReason


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: FinishReason
    error: str
    wait: float = 0.0  # seconds


class Refusals:
    """Asked before anything of a turn is kept, so that one that is refused leaves no trace."""

    def __init__(
        self, config: CoreConfig, limit: int, kv: KVManager, scheduler: Scheduler, tiers: Tiers | None
    ) -> None:
        """limit: tokens that the longest session can come to."""
        self._config = config
        self._limit = limit
        self._kv = kv
        self._scheduler = scheduler
        self._tiers = tiers

    def of(
        self, command: Submit, tokens: array[int], session: Session | None, namespace: bytes, now: float
    ) -> Refusal | None:
        """None: the turn may begin. session: as it is before the turn."""
        error = self._never(command, tokens, session)
        if error:
            return Refusal(FinishReason.REFUSED, error)
        if command.shed and not command.generated:
            return self._too_late(command, tokens, session, namespace, now)
        return None

    def _never(self, command: Submit, tokens: array[int], session: Session | None) -> str:
        """Why this turn can never run; empty if it can."""
        if session is not None and session.turn is not None:
            return f"session {command.session} has a running turn"
        if len(tokens) - command.generated < 1:
            return "the prompt is empty"
        if len(tokens) >= self._limit:
            bound = "context" if self._limit == self._config.max_model_len else "KV pool"
            return f"{len(tokens)} tokens leave no room in the {bound}, which holds {self._limit}"
        if command.sampling.max_tokens < command.generated + 1:
            return "max_tokens leaves nothing to generate"
        return ""

    def _too_late(
        self, command: Submit, tokens: array[int], session: Session | None, namespace: bytes, now: float
    ) -> Refusal | None:
        """What the queue, as predicted, cannot keep is not begun. What could not be kept if nobody else were
        there is: to come back later would change nothing."""
        slo, arrived = command.slo, arrival(command, now)
        due = first_due(slo, arrived)
        if due == math.inf:
            return None
        kept = max(self._kv.cached_tokens(namespace, tokens), self._kept_below(session, namespace, tokens))
        lacking = max(len(tokens) - kept, 1)
        newcomer = Newcomer(
            command.tenant,
            slo,
            arrived,
            -command.priority,
            len(tokens) - lacking,
            lacking,
            self._kv.needed_blocks(namespace, tokens),
        )
        forecast = self._scheduler.forecast(newcomer)
        left, promised = due - now, due - arrived
        if forecast.seconds <= left or forecast.alone > promised:
            return None
        self._scheduler.time.shed += 1
        return Refusal(
            FinishReason.SHED,
            f"{promised:.4g} s were promised for the first token, "
            f"and the queue is predicted to take {forecast.seconds:.2g} s.",  # it is others' queue, too
            forecast.seconds - left,
        )

    def _kept_below(self, session: Session | None, namespace: bytes, tokens: array[int]) -> int:
        """Leading tokens that have KV somewhere because they are the session's own."""
        if self._tiers is None or session is None or session.namespace != namespace:
            return 0
        known = self._tiers.ledger.known.get(session.id)
        if known is None:
            return 0
        kept = len(known.tokens) - self._tiers.restores.lacking(known)
        return min(kept, common_prefix(known.tokens, tokens))


def arrival(command: Submit, now: float) -> float:
    """When its client asked."""
    return now if command.arrived is None else min(command.arrived, now)
