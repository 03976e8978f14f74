"""One engine driven step by step: what is timed, and that no run finds KV of an earlier one."""

from __future__ import annotations

import pytest

from agentserve.bench.drive import Drive
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.core.plan import Plan, StepResult
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.sim.executor import SimExecutor
from tests.engines import VOCAB, groups_of
from tests.hello import made_up_hello


class Seen(SimExecutor):
    """Keeps the plans that it runs."""

    def __init__(self, pages: int) -> None:
        super().__init__((pages,), 4, StepCost(), VOCAB)
        self.plans: list[Plan] = []

    def run(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        return super().run(plan)


def engine(pages: int) -> tuple[Drive, Seen, EngineCore]:
    config = CoreConfig(page_size=4, max_batched_tokens=16, max_model_len=200)
    executor, groups = Seen(pages), groups_of(1)
    core = EngineCore(config, groups, (pages,), StepCost())
    hello = made_up_hello(max_model_len=core.limit, page_size=4, pages=pages)
    return Drive(BuiltEngine(core, executor, hello, config, groups, (pages,), StepCost())), executor, core


PROMPTS = [[7 * prompt + place for place in range(20)] for prompt in range(3)]


def test_a_decode_times_only_steps_in_which_everyone_decodes() -> None:
    drive, executor, core = engine(pages=64)
    seconds = drive.decode(PROMPTS, 5)
    assert len(seconds) == 5
    assert min(seconds) > 0
    assert [(len(plan.chunks), plan.tokens) for plan in executor.plans[-5:]] == [(3, 3)] * 5
    whole = [plan for plan in executor.plans if len(plan.chunks) == plan.tokens == 3]
    assert len(whole) == 5, "no more steps than those asked for"
    assert not core.has_work


def test_every_run_computes_all_of_its_prompts() -> None:
    drive, executor, core = engine(pages=64)
    for _ in range(3):
        executor.plans.clear()
        assert drive.prefill(PROMPTS) > 0
        assert sum(plan.tokens for plan in executor.plans) == 60
        assert not core.has_work
    executor.plans.clear()
    drive.decode(PROMPTS, 1)
    assert sum(plan.tokens for plan in executor.plans) >= 60


def test_what_does_not_fit_is_one_line() -> None:
    drive, executor, _ = engine(pages=4)
    for run in (lambda: drive.prefill(PROMPTS), lambda: drive.decode(PROMPTS, 2)):
        with pytest.raises(ValueError, match="20") as caught:
            run()
        assert "\n" not in str(caught.value)
    assert executor.plans == []
