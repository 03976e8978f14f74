"""The check of a GPU, run in the interpreter: it comes to its end, and tells what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from agentserve.bench.gpu import check, paged, rowwise, whole
from agentserve.bench.gpu.device import Device, find
from agentserve.bench.gpu.parts import PARTS, run, until_it_fails
from agentserve.bench.gpu.result import Check, Part
from agentserve.bench.gpu.sizes import sizes_for
from agentserve.bench.report import Row
from agentserve.cli.main import app
from agentserve.sim.traces.draw import LONGEST, pressure
from kernels.triton.attention_plan import DecodeLayout
from kernels.triton.ops import TritonOps

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def test_parts_fit_into_five_minutes_together() -> None:
    alone = [task.seconds for task in PARTS.values() if not task.together]
    assert sum(alone) + max(task.seconds for task in PARTS.values() if task.together) <= 300


@pytest.mark.parametrize("name", ["rows-fp16", "kernels", "transfers"])
def test_parts_come_to_their_end(name: str) -> None:
    found = run("limits", True, None)
    assert [row.name for row in found.rows] == ["device memory", "fp16 products"]
    part = run(name, True, found)
    assert part.error == ""
    assert [one for one in part.checks if not one.passed] == []
    assert all(row.value > 0 for row in part.rows)
    assert len(part.rows) + len(part.checks) > 2


def test_bf16_is_left_to_a_gpu() -> None:
    part = run("rows-bf16", True, None)
    assert part.good
    assert part.notes == ["the interpreter has no products in it"]


def test_what_is_wrong_is_found() -> None:
    """A kernel that computes something else, and one whose rows hang on their company."""
    x = torch.randn(5, 8)
    good = rowwise.RowWise("double", (x,), lambda x: 2 * x, lambda x: 2 * x)
    bad = rowwise.RowWise("mean", (x,), lambda x: x - x.mean(0), lambda x: x - x.mean(0))
    assert rowwise.close("double", 2 * x, 2 * x, torch.float32).passed
    assert not rowwise.close("double", 2 * x, 2.001 * x, torch.float32).passed
    assert not rowwise.close("double", torch.full_like(x, torch.nan), x, torch.float32).passed
    assert rowwise.invariant("double", good, 2 * x).passed
    assert not rowwise.invariant("mean", bad, x - x.mean(0)).passed


def test_every_kind_of_weights_has_numbers() -> None:
    found = rowwise.matrices(64, 64)
    assert set(found) == {"Q8_0", "Q4_0", "FP8", "INT4"}
    for kept in found.values():
        wide = rowwise.expand(kept, torch.float32)
        assert wide.shape == (64, 64)
        assert bool(wide.isfinite().all())
        assert float(wide.std()) > 0.01


def test_a_part_that_fails_tells_why_and_one_that_hangs_is_ended() -> None:
    part = run("kernels", True, None)
    assert part.error == "ValueError: the device's limits were not measured"
    assert not part.good
    told: list[Part] = []
    parts = check.check(True, told.append, ["limits"], {"limits": 0.05})
    assert told == parts
    assert [one.error for one in parts] == ["took longer than 0 s"]


def test_parts_that_run_together_are_told_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told: list[Part] = []
    check.check(False, told.append, ["rows-bf16", "pages-bf16"])
    assert [part.name for part in told] == ["rows-bf16", "pages-bf16"]
    assert {part.error for part in told} == {"RuntimeError: torch finds no CUDA device"}


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch finds no CUDA device"):
        find(interpreted=False)
    assert sizes_for(find(interpreted=True)).dtypes == (torch.float16,)


@pytest.mark.parametrize("command", ["gpu-check --interpreter --part limits", "kernels-aot"])
def test_results_that_cannot_be_written_are_told_before_the_work(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = CliRunner().invoke(app, ["bench", *command.split(), "--results", str(tmp_path / "file" / "in")])
    assert told.exit_code == 1
    assert told.stdout == ""
    assert told.stderr.startswith("agentserve: [Errno 20] Not a directory")


def test_a_part_is_told_in_lines() -> None:
    row = Row("copy", 50.0, "GB/s", 100.0, "memory", True, variant="ours")
    part = Part("some", [row], [Check("a", True), Check("b", False, "differs")], ["said"], seconds=2.4)
    lines = check.lines(part)
    assert lines[0] == "some: NOT GOOD, 2 s, 1 of 2 checks passed"
    assert lines[1] == "  failed: b: differs"
    assert lines[2].split() == ["copy", "(ours)", "50.00", "GB/s", "50.0%", "of", "memory"]
    assert lines[3] == "  said"


def test_an_error_does_not_take_along_what_was_found_before_it() -> None:
    def found() -> Iterator[int]:
        yield 1
        yield 2
        raise RuntimeError("out of resource")

    assert until_it_fails(found()) == ([1, 2], "RuntimeError: out of resource")
    assert until_it_fails(iter([3])) == ([3], "")


def test_a_rehearsal_runs_everything_once() -> None:
    runs: list[int] = []
    on = Device(CPU, "some", reduced=False)
    assert len(on.seconds(lambda: runs.append(1), 5)) == len(runs) == 5
    assert len(replace(on, rehearsed=True).seconds(lambda: runs.append(1), 5)) == len(runs) - 5 == 1


def test_recorded_attention_is_compared_with_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    on = find(interpreted=True)
    sizes, dtype, ops = sizes_for(on), torch.float16, TritonOps(CPU)
    among = [one for one in paged.sequences(sizes, dtype) if one.asked == 1]
    assert paged._recorded("it", among, on, sizes, ops, dtype=dtype, kept=dtype).passed
    monkeypatch.setattr(DecodeLayout, "fill", lambda layout, positions, tables: None)
    assert not paged._recorded("it", among, on, sizes, ops, dtype=dtype, kept=dtype).passed


def test_agents_fit_into_the_context_of_the_model() -> None:
    """As `bench.agents.engine.play` asks: the context's limit, and the longest reply that may follow."""
    spec = pressure()
    fitting = whole._fitting(spec, 8192)
    assert fitting.context_limit + round(LONGEST * fitting.output) == 8192
    assert whole._fitting(spec, 10**6).context_limit == spec.context_limit


PYTHON = """#!/bin/sh
case "$2" in
    *is_available*) exit {gpu} ;;
    *find_spec*) echo "{lacks}" ;;
    *get_current_target*) echo "RuntimeError: Failed to find C compiler." >&2; exit {compiler} ;;
    *) echo "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("python", "status", "said"),
    [
        ({"gpu": 1, "lacks": "", "compiler": 0}, 2, "finds no CUDA device"),
        ({"gpu": 0, "lacks": "gguf", "compiler": 0}, 2, "lacks: gguf"),
        ({"gpu": 0, "lacks": "", "compiler": 1}, 2, "cannot use the GPU: RuntimeError: Failed to find C"),
        ({"gpu": 0, "lacks": "", "compiler": 0}, 0, "bench gpu-check --results benchmarks/results --part x"),
    ],
)
def test_the_script_says_what_is_missing(
    tmp_path: Path, python: dict[str, object], status: int, said: str
) -> None:
    stub = tmp_path / "python"
    stub.write_text(PYTHON.format(**python))
    stub.chmod(0o755)
    command, environment = [str(ROOT / "benchmarks/gpu_check.sh"), "--part", "x"], {"PYTHON": str(stub)}
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert said in done.stdout + done.stderr


def script(*flags: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [str(ROOT / "benchmarks/gpu_check.sh"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_script_tells_what_is_missing() -> None:
    done = script("--interpreter", python="/no/python")
    assert (done.returncode, done.stderr) == (2, "gpu_check: /no/python is no Python that runs\n")
    done = script()
    assert done.returncode == 2
    assert done.stderr.startswith(f"gpu_check: the torch of {sys.executable} finds no CUDA device.")
    done = script("--help")
    assert done.returncode == 0
    assert "--part" in done.stdout


@pytest.mark.prove
def test_the_whole_check_comes_to_its_end_in_the_interpreter() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / "benchmarks/gpu_check.sh"), "--interpreter"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("all good")
    for name in PARTS:
        assert f"\n{name}: good" in done.stdout
