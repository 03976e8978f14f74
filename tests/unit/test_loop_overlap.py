"""The worker's loop with overlap: what is handled while a step runs, and what waits for its end."""

from __future__ import annotations

from agentserve.core.plan import Plan, StepResult
from agentserve.core.record import Commanded, Planned, decode_entries
from agentserve.messages import Abort, Command, Describe
from agentserve.types import FinishReason, SessionId, TurnId
from tests.unit.test_loop import Executor, Worker, submit


class Scripted(Executor):
    """Sends commands to its own loop while its first steps compute."""

    def __init__(self, script: dict[int, list[Command]]) -> None:
        super().__init__()
        self.script = script
        self.worker: Worker | None = None

    def run(self, plan: Plan) -> StepResult:
        assert self.worker is not None
        self.worker.send(*self.script.get(plan.step, ()))
        return super().run(plan)


def test_what_could_take_pages_waits_for_the_step_and_what_comes_after_it_too() -> None:
    script: dict[int, list[Command]] = {
        2: [submit("b", [4, 5], 3), Abort(SessionId("a"), TurnId(1)), submit("c", [6], 2), Describe(1)]
    }
    executor = Scripted(script)
    worker = executor.worker = Worker(overlap=True, executor=executor)
    worker.thread.start()
    worker.send(submit("a", [1, 2, 3], 40))
    assert {(end.session, end.reason) for end in worker.until_ended(3)} == {
        ("a", FinishReason.ABORTED),
        ("b", FinishReason.LENGTH),
        ("c", FinishReason.LENGTH),
    }
    worker.peer.close()
    worker.thread.join(20)
    worker.link.close()
    entries = list(decode_entries(worker.log.getvalue()))
    steps = [place for place, entry in enumerate(entries) if isinstance(entry, Planned) and entry.plan]
    kinds = [type(each.command if isinstance(each, Commanded) else each).__name__ for each in entries]
    assert kinds[steps[1] :][:6] == ["Planned", "Submit", "Finished", "Abort", "Submit", "Describe"]
