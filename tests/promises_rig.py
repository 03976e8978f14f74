"""A core whose steps take what the cost model says, and turns that were promised something."""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.core.cost import StepCost
from agentserve.core.plan import Plan
from agentserve.messages import StateChange, TurnEnded
from agentserve.types import SessionState
from tests.engines import Rig

COST = StepCost(fixed=0.01, per_row=0.001, per_token=0.001)


class PromisesRig(Rig):
    """Time passes as steps are predicted to take it, and not otherwise."""

    def __init__(self, pages: Sequence[int] = (64,), cost: StepCost = COST, **config: object) -> None:
        super().__init__(pages, cost=cost, **config)  # type: ignore[arg-type]
        self.now = 1.0  # at 0 nothing has happened

    def step(self) -> Plan | None:
        plan = self.core.begin_step(self.now)
        self.core.check()
        if plan is not None:
            self.plans.append(plan)
            result = self.executor.run(plan)
            self.now += result.seconds
            self.core.finish_step(result, self.now)
        self._collect()
        return plan

    def entered(self) -> list[str]:
        """Sessions in the order in which their turns got a seat for the first time."""
        seen: dict[str, None] = {}
        for event in self.events:
            if isinstance(event, StateChange) and event.state in (
                SessionState.PREFILLING,
                SessionState.DECODING,
            ):
                seen.setdefault(event.session)
        return list(seen)

    def all_ended(self) -> list[TurnEnded]:
        return [event for event in self.events if isinstance(event, TurnEnded)]
