"""`agentserve fit`: from a server's logs to a file that server and simulator read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from agentserve.cli.main import app
from agentserve.core.timing.saved import decode_saved
from agentserve.messages import GroupPages
from agentserve.records.lines import IterationRecord, Line, Opened, Swapped, encode_line
from agentserve.sim.hardware import HardwareError, hardware_named
from tests.unit.test_timing_fitting import TRUE, mixed_loads, timed
from tests.unit.test_timing_saved import HERE

OPENED = Opened(
    at_ts=0.0, unix=0.0, model="m", policy="p", worker=0, groups=("full",), page_size=16, step_tokens=512,
    fingerprint=HERE,
)  # fmt: skip


def iterations(count: int, off: float = 0.0) -> list[IterationRecord]:
    """off: by what share each step took longer than it was predicted to; 0: it was not predicted."""
    found = []
    for number, step in enumerate(timed(mixed_loads(count, seed=count), noise=0.02), start=1):
        took = step.seconds * 1e3
        found.append(IterationRecord(
            step=number, begin_ts=float(number), scheduled_tokens=step.load.rows, decodes=step.load.decodes,
            chunks=step.load.chunks, iteration_ms=took + 1, model_ms=took,
            predicted_ms=took / (1 + off) if off else 0.0, bound_ms=took * 2 if off else 0.0,
            kv_pages=(GroupPages(1, 2, 3),), swapped_bytes=Swapped(), binding_limit="", limits={},
            preempted=0, running=1, waiting=0, features=msgspec.to_builtins(step.load),
        ))  # fmt: skip
    return found


def log_file(path: Path, lines: Sequence[Line], opened: Opened = OPENED) -> Path:
    path.write_bytes(b"".join(encode_line(line) for line in (opened, *lines)))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    output = folder / "model.json"
    recording = folder / "recording"
    recording.mkdir()
    log_file(recording / "iterations.w0.1.jsonl", iterations(300, off=0.25))
    newer = log_file(recording / "iterations.w0.jsonl", iterations(400))
    newer.write_bytes(newer.read_bytes()[:-30])  # the worker was killed
    result = run("fit", recording, "-o", output)
    assert result.exit_code == 0, result.output
    assert "in the step: 1 lines" in result.output
    assert "699 steps of cpu, EPYC" in result.output
    assert "as it ran     300 steps: off by 20.0%" in result.output
    assert "0.0% beyond the bound, which is 2.50 x predicted" in result.output
    assert "held out" in result.output
    assert "no step had any of: per_masked" in result.output
    return output


def test_the_file_has_what_was_planted(fitted: Path) -> None:
    saved = decode_saved(fitted.read_bytes())
    assert saved.fingerprint == HERE
    assert saved.steps == 699
    assert saved.held_out.mape < 0.03
    for load in mixed_loads(50, seed=77):
        assert saved.cost.predict(load) == pytest.approx(TRUE.predict(load), rel=0.1)


def test_the_simulator_imagines_the_machine_that_was_fitted(fitted: Path) -> None:
    machine = hardware_named(f"cpu-smollm2@{fitted}")
    saved = decode_saved(fitted.read_bytes())
    assert machine.step_cost() == saved.cost
    assert machine.step([(100, 1)] * 4) == saved.cost.step([(100, 1)] * 4)
    assert machine.prices().prefill == saved.cost.prefill_line(machine.max_batched_tokens)
    assert machine.name == f"cpu-smollm2@{fitted}"
    assert "699" in machine.how[0]
    result = run("sim", "run", "--agents", 2, "--turns", 1, "--step-model", fitted)
    assert result.exit_code == 0, result.output
    plain = run("sim", "run", "--agents", 2, "--turns", 1)
    assert result.output != plain.output


def test_a_file_that_is_none_is_one_line(tmp_path: Path, fitted: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_bytes(fitted.read_bytes().replace(b'"per_pair": ', b'"per_pair": 1'))
    for file, said in ((tmp_path / "no.json", "No such file"), (broken, "damaged")):
        with pytest.raises(HardwareError, match=said) as caught:
            hardware_named(f"cpu-smollm2@{file}")
        assert "\n" not in str(caught.value)
        result = run("sim", "run", "--step-model", file)
        assert result.exit_code == 1
        assert said in result.output


def test_what_cannot_be_fitted_is_one_line(tmp_path: Path) -> None:
    few = log_file(tmp_path / "few", iterations(50))
    elsewhere = msgspec.structs.replace(OPENED, fingerprint=msgspec.structs.replace(HERE, threads=9))
    other = log_file(tmp_path / "other", iterations(150), elsewhere)
    nobody = log_file(tmp_path / "nobody", iterations(150), msgspec.structs.replace(OPENED, fingerprint=None))
    bare = [msgspec.structs.replace(each, features=None) for each in iterations(150)]
    failed = [msgspec.structs.replace(each, failed=True) for each in iterations(150)]
    (tmp_path / "text").write_text("hello\n")
    output = tmp_path / "model.json"
    for logs, said in (
        ([few], "50 steps are too few"),
        ([log_file(tmp_path / "bare", bare)], "0 steps are too few"),
        ([log_file(tmp_path / "failed", failed)], "0 steps are too few"),
        ([tmp_path / "text"], "nothing says whose steps these are"),
        ([nobody], "nothing says whose steps these are"),
        ([tmp_path / "none"], "No such file"),
        ([few, other], "threads: 2, not 9"),
    ):
        result = run("fit", *logs, "-o", output)
        assert result.exit_code == 1
        assert said in result.output
        assert len(result.output.strip().splitlines()) == 1
    assert not output.exists()
