"""What `agentserve records` says of a recording, against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from agentserve.bench.recorded import of_iterations, of_requests, report
from agentserve.cli.main import app
from agentserve.messages import GroupPages
from agentserve.records.lines import Gap, IterationRecord, Opened, RequestRecord, Status, Swapped, encode_line
from agentserve.records.reader import read_records
from agentserve.sim.experiment.metrics import Spread

GOOD = RequestRecord(
    request="r",
    route="/v1/chat/completions",
    tenant="a",
    session="s",
    turn=1,
    policy="p",
    status=Status.COMPLETED,
    reason="stop",
    arrival_ts=10.0,
    submit_ts=10.0,
    admit_ts=11.0,
    first_token_ts=12.0,
    every_token_ts=(2000.0, 100.0, 300.0),
    finish_ts=12.5,
    prompt_tokens=100,
    prefix_hit_tokens=60,
    output_tokens=3,
    computed_tokens=42,
    preemption_count=1,
    queue_reasons={},
    slo=None,
    slo_met=True,
)
STEP = IterationRecord(
    step=1,
    begin_ts=10.0,
    scheduled_tokens=30,
    decodes=2,
    chunks=1,
    iteration_ms=100.0,
    model_ms=90.0,
    predicted_ms=99.0,
    kv_pages=(GroupPages(1, 2, 3),),
    swapped_bytes=Swapped(1 << 20, 2 << 20),
    binding_limit="tokens",
    limits={"tokens": 1},
    preempted=1,
    running=3,
    waiting=0,
)
changed = msgspec.structs.replace
REQUESTS = [
    GOOD,
    changed(GOOD, tenant="b", arrival_ts=9.0, status=Status.LENGTH, slo_met=False),
    changed(
        GOOD, status=Status.REJECTED, reason="over_limit", slo_met=None, every_token_ts=(), finish_ts=14.0
    ),
    changed(GOOD, status=Status.SHED, reason="shed", slo_met=False, every_token_ts=()),
    changed(GOOD, status=Status.CANCELLED, slo_met=None, every_token_ts=(9e9, 9e9)),
]
STEPS = [
    STEP,
    changed(STEP, iteration_ms=50.0, model_ms=45.0, predicted_ms=36.0, binding_limit="", scheduled_tokens=10),
    changed(STEP, iteration_ms=50.0, model_ms=50.0, predicted_ms=40.0, failed=True),
    changed(STEP, predicted_ms=0.0),
]


def test_figures_of_requests() -> None:
    found = of_requests(REQUESTS)
    assert (found.requests, found.seconds) == (5, 5.0)
    assert found.statuses == {"completed": 1, "length": 1, "rejected": 1, "shed": 1, "cancelled": 1}
    assert found.rejections == {"over_limit": 1, "shed": 1}
    assert found.ttft == Spread(2.5, 2.95, 2.99)
    assert found.queue == Spread(1.5, 1.95, 1.99)
    assert found.tpot == Spread(0.2, 0.2, 0.2)
    assert found.tbt is not None
    assert (found.tbt.p50, found.tbt.p99) == (pytest.approx(0.2), pytest.approx(0.3))
    assert (found.prompt_tokens, found.prefix_hit_tokens, found.output_tokens) == (200, 120, 6)
    assert (found.promised, found.kept, found.preemptions) == (3, 1, 5)


def test_figures_of_iterations() -> None:
    found = of_iterations(STEPS)
    assert (found.iterations, found.mean_tokens, found.preempted) == (4, 25.0, 4)
    assert found.host_share == pytest.approx(1 - 275 / 300)
    assert found.binding == {"tokens": 3, "": 1}
    assert (found.swapped_in, found.swapped_out) == (4 << 20, 8 << 20)
    assert (found.predicted, found.late) == (2, 0.5)
    assert found.error == pytest.approx((0.1 + 0.2) / 2)


def test_a_figure_of_nothing_is_none() -> None:
    assert of_requests([]).ttft is None
    assert of_iterations([]).error is None
    refused = [changed(GOOD, status=Status.REJECTED, first_token_ts=None, admit_ts=None, every_token_ts=())]
    assert of_requests(refused).queue is None


def test_the_command_sums_a_folder_up(tmp_path: Path) -> None:
    opened = Opened(at_ts=0.0, unix=0.0, model="m", policy="p")
    lines = [opened, *REQUESTS, Gap(2)]
    (tmp_path / "requests.jsonl").write_bytes(b"".join(map(encode_line, lines)) + b'{"torn')
    (tmp_path / "iterations.w0.jsonl").write_bytes(b"".join(map(encode_line, [opened, *STEPS])))
    told = CliRunner().invoke(app, ["records", str(tmp_path)])
    assert told.exit_code == 0
    assert told.output.strip() == report(read_records(tmp_path)).strip()
    assert "2 line(s) were never written, 1 cannot be read" in told.output
    for part in ("of m, policy p", "5 requests in 5.0 s", "TTFT, s", "tokens 75%", "off by 15.0%"):
        assert part in told.output
    figures = json.loads(CliRunner().invoke(app, ["records", str(tmp_path), "--json"]).output)
    assert figures["requests"]["ttft"] == {"p50": 2.5, "p95": 2.95, "p99": 2.99}
    only = json.loads(CliRunner().invoke(app, ["records", str(tmp_path), "--json", "--tenant", "b"]).output)
    assert (only["requests"]["requests"], only["iterations"]["iterations"]) == (1, 0)


@pytest.mark.parametrize("arguments", [["nowhere"], ["."], [".", "--tenant", "x"]])
def test_nothing_there_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["records", *arguments])
    assert told.exit_code == 1
    assert len(told.output.splitlines()) == 1
