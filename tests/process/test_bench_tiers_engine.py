"""`agentserve bench tiers` on the real engine, small: KV is where each row says, and rows are of pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentserve.bench.report import Row
from agentserve.bench.tiers import resume, run, steps
from agentserve.bench.tiers.engine import Engine
from agentserve.bench.tiers.findings import Findings
from agentserve.bench.tiers.steered import SteeredPolicy
from agentserve.executor.runner import TorchExecutor
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.types import SessionId
from tiering.policy.base import Choice

pytestmark = [pytest.mark.process, pytest.mark.model]

RESUMES = resume.Plan(context=256, result=16, rounds=2)
STEPS = steps.Plans((steps.Load(2, 40), steps.Load(1, 40, resting=3)), seconds=0.01, stretches=2)
SETTINGS = run.EngineSettings({"threads": "1"}, RESUMES, STEPS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder = tmp_path_factory.mktemp("data")
    found = run.measure(folder, None, SETTINGS, lambda stage: None)
    assert list(folder.iterdir()) == []
    return found


@pytest.fixture(scope="module")
def made() -> tuple[WorkerSpec, BuiltEngine]:
    return run.build(SETTINGS)


@pytest.fixture
def built(made: tuple[WorkerSpec, BuiltEngine]) -> BuiltEngine:
    return made[1]


def rows(found: Findings, group: str) -> list[Row]:
    return [row for row in found.rows if row.group == group]


def test_a_resume_from_every_place(found: Findings) -> None:
    """That KV came from where the row says is checked by the measurement: it raises otherwise."""
    times = [row for row in rows(found, "resume") if row.unit == "ms"]
    places = [resume.NEVER, resume.HIDDEN, resume.HOST, resume.WARM, resume.COLD, resume.RECOMPUTE]
    if "cold resume" in found.skipped:
        places.remove(resume.COLD)
    assert [row.name for row in times] == [f"resume: {place}" for place in places]
    assert all(len(row.runs) == RESUMES.rounds and min(row.runs) > 0 for row in times)
    assert times[0].limit is None
    assert {row.limit for row in times[1:]} == {times[0].value}
    ratios = [row for row in rows(found, "resume") if row.unit == "x"]
    assert len(ratios) == (2 if "cold resume" not in found.skipped else 0)
    assert all(row.limit == resume.TIMES_FASTER for row in ratios)


def test_steps_beside_steps(found: Findings) -> None:
    names = [row.name for row in rows(found, "steps")]
    assert [name.split(": ")[0] for name in names[::3]] == [load.name for load in STEPS.loads]
    for row in rows(found, "steps"):
        assert len(row.runs) == STEPS.stretches
    assert all(row.value > 0 for row in rows(found, "steps") if row.unit in {"x", "us/step"})


def test_kv_that_is_elsewhere_is_not_measured(made: tuple[WorkerSpec, BuiltEngine], tmp_path: Path) -> None:
    """A trial whose KV was not found is an error, not a slow figure."""
    spec, built = made
    trials = resume.Resumes(built, spec, tmp_path, RESUMES)
    trials._write_out()
    (tmp_path / "kv" / "worker-0" / "data.mdb").unlink()
    with pytest.raises(RuntimeError, match=r"on disk, cold.*0 prompt tokens had KV, not 256"):
        trials._note(resume.COLD, trials._from_disk(cold=False))


def test_an_engine_without_tiers_runs_and_says_what_fails(built: BuiltEngine) -> None:
    assert isinstance(built.executor, TorchExecutor)
    engine = Engine(built, built.executor)
    session = SessionId("a")
    first = engine.first_token(session, range(100, 164))
    again = engine.first_token(session, range(100, 180))
    assert (first.cached, again.cached) == (0, 64)
    assert engine.tiers() is None
    with pytest.raises(RuntimeError, match="a: the prompt is empty"):
        engine.first_token(session, [])
    with pytest.raises(RuntimeError, match="says nothing of b"):
        engine.view(SessionId("b"))
    engine.close()


def test_many_commands_at_once_do_not_wait_for_the_socket(built: BuiltEngine) -> None:
    executor = steps.Measured(built.executor)
    executor.skips = True
    engine = Engine(built, executor)
    for number in range(200):
        engine.submit(SessionId(f"s{number}"), range(number, number + 600), 1)
    engine.settle()
    assert not engine.core.has_work
    assert engine.core.view().sessions == 200
    engine.close()


def test_the_steered_policy_says_what_it_is_told() -> None:
    policy = SteeredPolicy()
    for choice in Choice:
        policy.choice = choice
        assert policy.decide("s", None, None).choice is choice  # type: ignore[arg-type]
