"""What is written down of a worker's iterations, and what of it goes with its turns."""

from __future__ import annotations

import msgspec

from agentserve.core.engine import EngineCore
from agentserve.messages import TiersView, TurnEnded, TurnUsage, Withdrawn
from agentserve.records.lines import Swapped
from agentserve.server.workers.iterations import IterationLog
from agentserve.types import FinishReason, SessionId, TurnId
from tests.unit.test_loop import CONFIG, GROUPS, PAGES, Executor, Lines, submit


def test_what_kept_a_turn_waiting_goes_with_it_to_another_worker() -> None:
    log = IterationLog(Lines())  # type: ignore[arg-type]
    core = EngineCore(CONFIG, GROUPS, PAGES)
    core.handle(submit("a", [1, 2], 9), 0.0)
    plan = core.begin_step(1.0)
    assert plan is not None
    log.planned(msgspec.structs.replace(plan, reasons=((SessionId("b"), "pages"),)))
    usage = TurnUsage(2, 0, 0, 0, 1, 0.0, 0.0, 0.0, 1.0)
    left = Withdrawn(SessionId("b"), TurnId(1), usage)
    stays = Withdrawn(SessionId("b"), TurnId(1), None)
    ended = TurnEnded(SessionId("b"), TurnId(2), FinishReason.STOP, usage)
    # It leaves while the plan runs, and another turn of its session comes later.
    told, _ = log.reported([stays, left], core.view())
    log.ran(plan, 0.25, 1.0, 2.0)
    told += log.reported([ended], core.view())[0]
    held = msgspec.structs.replace(usage, held={"pages": 1})
    assert told == [stays, msgspec.structs.replace(left, usage=held), ended]


def test_swapped_bytes_are_those_since_the_step_before() -> None:
    lines = Lines()
    log = IterationLog(lines)  # type: ignore[arg-type]
    core = EngineCore(CONFIG, GROUPS, PAGES)
    core.handle(submit("a", [1, 2], 9), 0.0)
    for moved in (
        {"save": (1, 0.1)},
        {"save": (3, 0.2), "load": (2, 0.1)},
        {"save": (3, 0.2), "load": (2, 0.1)},
    ):
        plan = core.begin_step(1.0)
        assert plan is not None
        result = Executor().run(plan)
        core.finish_step(result, 2.0)
        log.ran(plan, 0.25, 1.0, 2.0)
        view = msgspec.structs.replace(core.view(), tiers=TiersView(moved=moved, block_bytes=100))
        log.reported([], view)
    assert [line.swapped_bytes for line in lines.lines] == [Swapped(0, 100), Swapped(200, 200), Swapped(0, 0)]
    assert {(line.iteration_ms, line.model_ms) for line in lines.lines} == {(1000.0, 250.0)}
