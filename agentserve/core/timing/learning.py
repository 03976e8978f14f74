"""Who learns how long steps take: the cost model in use, and through it the tiers' price of computing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentserve.core.cost import StepCost
from agentserve.core.market import PriceBook
from agentserve.core.plan import Chunk, Plan, StepResult
from agentserve.core.timing.drift import Drift
from agentserve.core.timing.tally import Attention, load_of


class Learning:
    def __init__(
        self, cost: StepCost, attention: Attention, step_tokens: int, book: PriceBook | None
    ) -> None:
        """step_tokens: of the steps that a long prompt is computed in. book: the tiers', if there are any."""
        self.attention = attention
        self.cost = cost  # by now
        self._drift = Drift(cost)
        self._line, self._paced = cost.prefill_line(step_tokens), cost.pace
        self._book = book
        self._running: dict[int, Plan] = {}  # by step; of one that was given up until a later one has ended
        self._tell()

    def begun(self, plan: Plan | None) -> None:
        if plan is not None:
            self._running[plan.step] = plan

    def cut(self, plan: Plan, chunks: Sequence[Chunk]) -> Plan:
        """The plan that runs in the place of `plan`: these chunks of it."""
        load = load_of(chunks, plan.copies, self.attention)
        predicted = self.cost.predict(load)
        cut = msgspec.structs.replace(
            plan, chunks=tuple(chunks), predicted_seconds=predicted, load=load,
            bound_seconds=self.cost.at_worst(predicted),
        )  # fmt: skip
        self.begun(cut)
        return cut

    def ended(self, result: StepResult) -> None:
        """The plan has run. One of which a part failed says nothing of steps."""
        plan = self._running.get(result.step)
        self._running = {step: later for step, later in self._running.items() if step > result.step}
        if plan is None or any(chunk.error for chunk in result.chunks):
            return
        if plan.load is not None:
            self._drift.ran(plan.load, result.seconds, plan.predicted_seconds)
            self.cost = self._drift.cost
        if self._book is not None and not self._tell() and result.seconds > 0:
            self._book.stepped([(chunk.start, len(chunk.tokens)) for chunk in plan.chunks], result.seconds)

    def _tell(self) -> bool:
        """Tell the tiers what computing costs, where that is known; else they learn it themselves."""
        if self._book is None or not self._drift.known:
            return False
        fixed, per_token, per_pair = self._line
        slower = self.cost.pace / self._paced
        self._book.predicted((fixed * slower, per_token * slower, per_pair * slower))
        return True
