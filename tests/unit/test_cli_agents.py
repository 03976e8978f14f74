"""The commands of the shoot-out and of agents in real time: errors in one line, results where asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentserve.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "belady"], 'no policy "belady"; there are: '),
        (["--hardware", "abacus"], 'no hardware "abacus"; known: cpu-smollm2, h200-llama-8b, tiny'),
        (["--oversubscription", "many"], "many"),
        (["--oversubscription", "0"], "above 0"),
        (["--oversubscription", ","], "at least one"),
        (["--hints", "sincere"], "sincere"),
    ],
)
def test_a_bad_shoot_out_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["sim", "policies", *arguments])
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.startswith("agentserve: ")
    assert result.stderr.count("\n") == 1


def test_a_shoot_out_writes_a_table_json_and_charts(tmp_path: Path) -> None:
    arguments = ["--only", "lru,priced,oracle", "--hardware", "cpu-smollm2", "--oversubscription", "1,2"]
    arguments += ["--seeds", "1", "--seconds", "10", "--hints", "none,hostile", "--tune", "2"]
    result = CliRunner().invoke(app, ["sim", "policies", *arguments, "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.count("hints none") == result.output.count("hints hostile") == 2
    assert len(list((tmp_path / "policies").glob("*.svg"))) == 8
    report = json.loads((tmp_path / "policies.json").read_text(encoding="utf-8"))
    assert report["tuned"] == 2
    assert report["seconds"] == {"cpu-smollm2": 10.0}
    assert [each["policy"] for each in report["standings"]] == ["lru", "priced", "oracle"] * 4
    assert all(each["of_oracle"] == 1.0 for each in report["standings"] if each["policy"] == "oracle")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hints", "sincere"], "--hints sincere"),
        (["--host-kv", "plenty"], "a size in bytes"),
        (["--device-kv", "none"], "a size in bytes"),
        (["--url", "http://127.0.0.1:9/v1", "--agents", "1"], "1 turns failed, the first: a0: "),
    ],
)
def test_bad_settings_of_agents_in_real_time_are_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "agents", *arguments])
    assert result.exit_code == 1
    assert said in result.stderr + str(result.exception)


@pytest.mark.model
def test_agents_on_the_real_engine_with_tiers_below(tmp_path: Path) -> None:
    """SmolLM2 with KV in a host slab and on disk: every turn is played, and the stores were used."""
    line = (
        "--agents 3 --lanes 3 --turns 2 --task 200 --longest-wait 0.3 --context-limit 1500 --device-kv 64MiB "
        f"--host-kv 64MiB --disk-kv 256MiB --max-batched-tokens 256 --data-dir {tmp_path}/kv "
    )
    arguments = ["bench", "agents", *line.split(), "--results", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "agents.json").read_text(encoding="utf-8"))
    assert report["summary"]["errors"] == 0
    assert report["summary"]["turns"] >= 6
    assert report["tiers"]["policy"] == "priced"
    assert report["tiers"]["host_slots"] > 0
    assert report["trace"]["longest_wait"] == 0.3
