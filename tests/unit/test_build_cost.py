"""The model that a worker begins with: of the file if it is of here; else measured, and nothing is lost."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from agentserve.config import load
from agentserve.core.cost import StepCost
from agentserve.core.timing.saved import encode_saved
from agentserve.executor.calibrate import Bounds
from agentserve.executor.runner import TorchExecutor
from agentserve.server.workers import build_cost
from agentserve.server.workers.build_cost import step_cost
from agentserve.server.workers.spec import WorkerSpec, replacement, worker_spec
from tests.unit.test_timing_saved import HERE, SAVED

MEASURED = StepCost(fixed=0.004, per_token=0.001, ratio=1.2)
BOUNDS = Bounds(groups=1, pages=100, page_size=16, positions=8192, rows=64, tokens=512, vocab_size=1000)
ELSEWHERE = msgspec.structs.replace(HERE, threads=8)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Bounds]:
    """Each time that steps were measured."""
    calls: list[Bounds] = []

    def measure(executor: object, bounds: Bounds) -> StepCost:
        calls.append(bounds)
        return MEASURED

    monkeypatch.setattr(build_cost, "measure_cost", measure)
    return calls


def spec_of(**flags: Any) -> WorkerSpec:
    return worker_spec(load(flags), 0, "unused", os.getpid(), cores=2)


def cost_of(spec: WorkerSpec) -> StepCost:
    return step_cost(spec, HERE, cast(TorchExecutor, None), BOUNDS)


def test_a_file_of_here_is_used_and_nothing_is_measured(tmp_path: Path, measured: list[Bounds]) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(encode_saved(SAVED))
    assert cost_of(spec_of(step_model=str(file))) == SAVED.cost
    assert not measured


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (encode_saved(msgspec.structs.replace(SAVED, fingerprint=ELSEWHERE)), "threads: 8, not 2"),
        (encode_saved(SAVED)[:-40], "not a cost model"),
        (encode_saved(SAVED).replace(b'"ratio": 1.25', b'"ratio": 1.26'), "digest"),
    ],
)
def test_another_file_is_told_kept_and_measured_instead(
    tmp_path: Path, measured: list[Bounds], caplog: pytest.LogCaptureFixture, data: bytes, said: str
) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert cost_of(spec_of(step_model=str(file))) == MEASURED
    assert len(measured) == 1
    assert file.read_bytes() == data
    (line,) = [record.getMessage() for record in caplog.records]
    assert said in line
    assert str(file) in line
    assert "\n" not in line


def test_no_file_where_one_is_named_stops_the_start_but_no_replacement(
    tmp_path: Path, measured: list[Bounds]
) -> None:
    spec = spec_of(step_model=str(tmp_path / "no.json"))
    with pytest.raises(ValueError, match=r"--step-model .*no\.json: No such file"):
        cost_of(spec)
    assert cost_of(replacement(spec, 0)) == MEASURED


def test_without_a_file_it_is_measured_only_where_a_limit_asks_for_it(measured: list[Bounds]) -> None:
    assert cost_of(spec_of()) == StepCost()
    assert not measured
    assert cost_of(spec_of(max_step_ms="100")) == MEASURED
    assert cost_of(msgspec.structs.replace(spec_of(), predicts=True)) == MEASURED


def test_a_limit_below_any_step_is_refused_whatever_the_model_is_of(
    tmp_path: Path, measured: list[Bounds]
) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(encode_saved(SAVED))
    for flags in ({}, {"step_model": str(file)}):
        with pytest.raises(ValueError, match=r"--max-step-ms 1: one token alone takes"):
            cost_of(spec_of(max_step_ms="1", **flags))


def test_results_are_delivered_meanwhile_where_the_device_computes_by_itself() -> None:
    assert not spec_of().overlap
    assert spec_of(device="cuda").overlap
    assert spec_of(overlap=True).overlap
    assert not spec_of(device="cuda", overlap=False).overlap
