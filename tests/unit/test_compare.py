"""Comparison with peers, from the contest to the command and its file; contestants are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentserve.bench import report
from agentserve.bench.compare import keeper, libraries, llamacpp, vllm
from agentserve.bench.compare.contest import Idle, PeerFailed, measure
from agentserve.bench.compare.peers import PEERS, Peer, Stage, compare_with
from agentserve.bench.compare.plan import WARM_UP, Scenario
from agentserve.bench.compare.result import (
    Comparison,
    Facts,
    Figure,
    ScenarioRatios,
    Setup,
    portable,
    scenario_ratios,
)
from agentserve.bench.compare.settings import Settings
from agentserve.cli.main import app

DECODE = Scenario("decode", 2, 16, 32)
PREFILL = Scenario("prefill", 1, 100)


def settings(peers: Path, **flags: str) -> Settings:
    return Settings(peers, None, flags, kv_gib=2, threads=2, start_limit=9, run_limit=9)


class Counting:
    """A contestant whose runs are written down; it uses CPU while others run if it is `restless`."""

    def __init__(
        self, name: str, log: list[tuple[str, str, int]], restless: float = 0.0, **settings: object
    ) -> None:
        self.facts = Facts(name, "1", settings)
        self._log = log
        self._used = 0.0
        self._restless = restless
        self.held = False

    def warm_up(self, scenario: Scenario) -> None:
        self.run(scenario, WARM_UP)

    def run(self, scenario: Scenario, number: int) -> Figure:
        assert not self.held
        self._log.append((self.facts.name, scenario.name, number))
        if scenario.length == 666:
            raise PeerFailed(f"{self.facts.name}: no")
        return Figure(10.0 + number, scenario.length)

    def cpu_seconds(self) -> float:
        self._used += self._restless
        return self._used

    def hold(self, held: bool) -> None:
        assert held != self.held
        self.held = held


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentserve.bench.compare.contest.SETTLE_SECONDS", 0.0)


@pytest.mark.usefixtures("hasty")
def test_everybody_warms_up_then_runs_in_turn() -> None:
    log: list[tuple[str, str, int]] = []
    said: list[ScenarioRatios] = []
    idle = Idle()
    pair = [Counting("peer", log), Counting("ours", log, restless=5.0)]
    rows = measure(pair, [DECODE, PREFILL], 2, idle, said.append)
    one = [("peer", WARM_UP), ("ours", WARM_UP), ("peer", 0), ("ours", 0), ("ours", 1), ("peer", 1)]
    assert log == [(who, s.name, number) for s in (DECODE, PREFILL) for who, number in one]
    assert rows == said
    assert [row.medians for row in rows] == [{"peer": 10.5, "ours": 10.5}] * 2
    assert idle.seconds == {"peer": 0.0, "ours": 20.0}  # watched in the peer's four runs, not in its own
    assert idle.cores()["ours"] > idle.cores()["peer"] == 0.0


@pytest.mark.usefixtures("hasty")
def test_all_others_stand_still_while_one_runs() -> None:
    crowd: list[Counting] = []
    awake: list[set[str]] = []

    class Watching(Counting):
        def run(self, scenario: Scenario, number: int) -> Figure:
            if number != WARM_UP:
                awake.append({one.facts.name for one in crowd if not one.held} ^ {self.facts.name})
            return super().run(scenario, number)

    crowd += [Watching(name, []) for name in ("peer", "ours", "ours too")]
    measure(crowd, [DECODE], 2, Idle(), lambda row: None)
    assert awake == [set()] * 6
    with pytest.raises(PeerFailed):
        measure(crowd, [replace(DECODE, length=666)], 1, Idle(), lambda row: None)
    assert not any(one.held for one in crowd)


@pytest.mark.usefixtures("hasty")
def test_the_first_failure_ends_it() -> None:
    log: list[tuple[str, str, int]] = []
    with pytest.raises(PeerFailed, match="peer: no"):
        measure([Counting("peer", log)], [Scenario("prefill", 1, 666), PREFILL], 1, Idle(), lambda row: None)
    assert len(log) == 1


def test_int8_activations_run_beside_float_ones(tmp_path: Path) -> None:
    both = libraries.variants({"weights": "stored", "activations": "int8"}, settings(tmp_path))
    assert list(both) == ["agentserve, float activations", "agentserve, int8 activations"]
    assert [flags["activations"] for flags in both.values()] == ["float", "int8"]
    [(name, flags)] = libraries.variants({"dtype": "fp32"}, settings(tmp_path)).items()
    assert name == "agentserve"
    assert flags == {"dtype": "fp32", "device_kv": "2GiB", "threads": "2"}


def test_what_a_peer_skips_is_noted() -> None:
    assert {s.name for s in libraries.SCENARIOS} - {s.name for s in llamacpp.SCENARIOS} == {
        "decode, 8 x 2000 tokens"
    }
    assert llamacpp.NOTES == ("decode, 8 x 2000 tokens: left out, 16,000 tokens to prefill in every run",)


def test_arguments_for_the_servers() -> None:
    assert vllm.core_list({1, 0}) == "0-1"
    assert vllm.core_list({3}) == "3"
    assert vllm.core_list({0, 2, 5}) == "0,2,5"
    assert vllm.as_arguments({"max_batched_tokens": "256"}) == ["--max-batched-tokens", "256"]


@pytest.mark.parametrize("peer", sorted(PEERS))
def test_a_peer_that_is_not_there_is_one_line(peer: str, tmp_path: Path) -> None:
    (tmp_path / "smollm2-hf").mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "agentserve",
            "bench",
            "compare",
            "--peer",
            peer,
            "--peers-dir",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"agentserve: {tmp_path}/{peer}/")


@contextmanager
def made_up(settings: Settings, logs: Path, fails: bool = False) -> Iterator[list[Counting]]:
    (logs / "peer.log").write_text("hello")
    if fails:
        raise PeerFailed(f"openvino: it ended; its output is in {logs / 'peer.log'}")
    log: list[tuple[str, str, int]] = []
    yield [Counting("openvino", log, folder=logs.name), Counting("agentserve", log)]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fails", [False, True])
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stages = (Stage(made_up, [DECODE]), Stage(partial(made_up, fails=fails), [PREFILL]))
    monkeypatch.setitem(PEERS, "openvino", Peer(stages, ("half a note",)))
    arguments = ["--peer", "openvino", "--peers-dir", str(tmp_path), "--runs", "3"]
    ended = CliRunner().invoke(app, ["bench", "compare", *arguments, "--results", str(tmp_path / "results")])
    logs = sorted(tmp_path.glob("agentserve-compare-*/*/peer.log"))
    if fails:
        assert ended.exit_code == 1
        assert [log.parent.name for log in logs] == ["0", "1"]
        assert f"agentserve: openvino: it ended; its output is in {logs[1]}\n" in ended.output
        return
    assert ended.exit_code == 0
    assert logs == []
    assert f"{PREFILL.name}: x 1.00" in ended.output
    assert "note: half a note" in ended.output
    found = json.loads((tmp_path / "results" / "compare-openvino.json").read_text())
    assert [row["name"] for row in found["rows"]] == [DECODE.name, PREFILL.name]
    assert found["rows"][0]["runs"] == {"openvino": [10, 11, 12], "agentserve": [10, 11, 12]}
    first, second = found["setups"]
    assert (first["peer"]["name"], first["ours"][0]["name"]) == ("openvino", "agentserve")
    assert [setup["scenarios"] for setup in (first, second)] == [[DECODE.name], [PREFILL.name]]
    assert [setup["peer"]["settings"] for setup in (first, second)] == [{"folder": "0"}, {"folder": "1"}]
    assert found["idle_cores"] == {"openvino": 0, "agentserve": 0}
    assert found["machine"]["cores"]
    assert found["versions"]["agentserve-llm"]


def test_another_model(tmp_path: Path) -> None:
    given = replace(settings(tmp_path), model=tmp_path / "x.gguf")
    with pytest.raises(PeerFailed, match=r"--model .*x\.gguf: no such file"):
        given.model_or("there.gguf")
    (tmp_path / "x.gguf").touch()
    assert given.model_or("there.gguf") == str(tmp_path / "x.gguf")
    (tmp_path / "there.gguf").touch()
    assert settings(tmp_path).model_or("there.gguf") == str(tmp_path / "there.gguf")


def test_a_scenario_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="'chess'"):
        compare_with("vllm", settings(tmp_path), runs=1, only="chess", command="", say=lambda row: None)


def test_what_is_kept_names_no_place_of_this_machine() -> None:
    found = scenario_ratios("decode", 1, True, "p", {"p": [Figure(2.0, 5)], "ours": [Figure(3.0, 5)]})
    peer = Facts("p", "1", {"command": "/opt/peers/vllm/bin/python serve", "model": "/opt/peers/m.gguf"})
    setups = [Setup(["decode"], peer, [Facts("ours", "3", {"command": "/usr/bin/python3 -m agentserve"})])]
    whole = Comparison("compare-p", "bench --peers-dir /opt/peers", {}, {}, setups, [found], {"p": 0.0})
    kept = portable(whole, {"/opt/peers": "PEERS_DIR", "/usr/bin/python3": "python"})
    assert kept.command == "bench --peers-dir PEERS_DIR"
    assert kept.setups[0].peer.settings == {
        "command": "PEERS_DIR/vllm/bin/python serve",
        "model": "PEERS_DIR/m.gguf",
    }
    assert kept.setups[0].ours[0].settings == {"command": "python -m agentserve"}
    assert (kept.rows, kept.idle_cores) == (whole.rows, whole.idle_cores)


def test_the_report_is_json(tmp_path: Path) -> None:
    found = scenario_ratios("decode", 1, True, "peer", {"peer": [Figure(2.0, 5)], "ours": [Figure(3.0, 5)]})
    peer, ours = Facts("peer", "1.2", {"threads": 2}), Facts("ours", "3", {})
    setups = [Setup(["decode"], peer, [ours])]
    whole = Comparison("compare-peer", "command", {"cores": "2"}, {}, setups, [found], {"peer": 0.0})
    path = report.write(whole, tmp_path / "new")
    assert path.name == "compare-peer.json"
    read = json.loads(path.read_text())
    assert read["rows"][0]["ratios"] == {"ours": 1.5}
    assert read["rows"][0]["runs"] == {"peer": [2.0], "ours": [3.0]}
    assert read["setups"][0]["peer"] == {"name": "peer", "version": "1.2", "settings": {"threads": 2}}


def test_descendants_are_read_from_proc(tmp_path: Path) -> None:
    for process, parent, name in ((5, 1, "a"), (6, 5, "b) R 1 ("), (7, 6, "c"), (8, 1, "d")):
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "stat").write_text(f"{process} ({name}) S {parent} 0 0")
    (tmp_path / "9").mkdir()  # it has ended while we looked
    assert sorted(keeper.descendants(5, tmp_path)) == [6, 7]
    assert list(keeper.descendants(7, tmp_path)) == []
