"""`agentserve sim traces`: from flags to reports."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from agentserve.cli.main import app
from agentserve.cli.traces_options import command_line, numbers, tenants
from agentserve.sim.experiment.report import load_report

SMALL = (
    *("sim", "traces", "--only", "chat", "--hardware", "tiny", "--scale", "0.0625", "--sessions", "10"),
    *("--policies", "chunked,ours-no-tiers", "--steps", "64", "--rates", "0.5,1.5", "--no-causes"),
)


def test_reports_and_raw_logs_are_written_and_a_second_run_takes_them(tmp_path: Path) -> None:
    first = CliRunner().invoke(app, [*SMALL, "--results", str(tmp_path)])
    assert first.exit_code == 0, first.output
    assert "chat, all lengths x 0.0625 (simulated: tiny" in first.output
    report = load_report(tmp_path / "traces-tiny.json")
    assert [stand.entrant.name for stand in report.studies[0].stands] == ["chunked", "ours-no-tiers"]
    assert str(tmp_path) not in (tmp_path / "traces-tiny.json").read_text()
    for suffix in ("md", "html"):
        assert "0.0625" in (tmp_path / f"traces-tiny.{suffix}").read_text()
    logs = sorted((tmp_path / "logs").glob("*.requests.jsonl"))
    assert len(logs) == 4
    assert len(logs[0].read_text().splitlines()) == 10
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    second = CliRunner().invoke(
        app, [*SMALL, "--results", str(tmp_path), "--against", str(tmp_path / "traces-tiny.json")]
    )
    assert second.exit_code == 0, second.output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()} == before
    assert "1.000" in second.output


def test_another_trace_is_refused_as_a_comparison(tmp_path: Path) -> None:
    quick = [*SMALL, "--no-knees", "--rates", "1"]
    assert CliRunner().invoke(app, [*quick, "--results", str(tmp_path)]).exit_code == 0
    other = CliRunner().invoke(app, [*quick, "--seed", "2", "--against", str(tmp_path / "traces-tiny.json")])
    assert other.exit_code == 1
    assert "not to be compared: trace differs" in other.stderr


def test_recorded_traces_are_played(tmp_path: Path) -> None:
    path = tmp_path / "toolagent.jsonl"
    lines = [
        {"timestamp": 500 * at, "input_length": 600, "output_length": 8, "hash_ids": [1, at]}
        for at in range(10)
    ]
    path.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    found = CliRunner().invoke(
        app,
        [
            *(
                "sim",
                "traces",
                "--trace",
                str(path),
                "--hardware",
                "tiny",
                "--scale",
                "0.125",
                "--steps",
                "64",
            ),
            *("--policies", "prefix-aware", "--no-knees", "--rates", "2"),
        ],
    )
    assert found.exit_code == 0, found.output
    assert "toolagent.jsonl, all lengths x 0.125" in found.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "longer"], "there are: chat, long, agents, mix"),
        (["--policies", "best"], 'no policy "best"'),
        (["--hardware", "h300"], 'no hardware "h300"'),
        (["--rates", "0,x"], "--rates: expected numbers above 0"),
        (["--tenants", "red=-1"], "--tenants: red: expected numbers above 0"),
        (["--scale", "3"], "scale: expected above 0 and at most 1"),
        (["--only", "long", "--hardware", "tiny"], "scale the trace down"),
        (["--trace", "none.jsonl"], "none.jsonl"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["sim", "traces", "--sessions", "10", *flags])
    assert found.exit_code == 1
    assert said in found.stderr.splitlines()[-1]


def test_what_is_typed_is_told_without_where_files_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "agentserve",
        "sim",
        "traces",
        "--results",
        "/home/me/out",
        "--against=/home/me/a.json",
        "--seed",
        "3",
    ]
    monkeypatch.setattr("sys.argv", words)
    assert command_line() == "agentserve sim traces --results out --against=a.json --seed 3"
    assert numbers("1, 2.5", "--x") == (1.0, 2.5)
    assert tenants("a=1,b") == {"a": 1.0, "b": 1.0}
