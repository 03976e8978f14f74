"""Comparison with peers: what is run in which order, on which inputs, and what becomes of the figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentserve.bench import report
from agentserve.bench.compare import compare, keeper, libraries, llamacpp, vllm
from agentserve.bench.compare.contest import Idle, PeerFailed, measure
from agentserve.bench.compare.plan import (
    WARM_UP,
    WARM_UP_TOKENS,
    Scenario,
    text_prompts,
    token_prompts,
    turns,
)
from agentserve.bench.compare.result import Comparison, Facts, Figure, Row, notes, row
from agentserve.bench.compare.served import BrokenStream, Stream, decode_rate, prefill_rate
from agentserve.bench.compare.settings import Settings
from agentserve.cli.main import app

DECODE = Scenario("decode", 2, 16, 32)
PREFILL = Scenario("prefill", 1, 100)


def settings(peers: Path, **flags: str) -> Settings:
    return Settings(peers, None, flags, kv_gib=2, threads=2, start_limit=9, run_limit=9)


@pytest.mark.parametrize("contestants", [("peer", "ours"), ("peer", "float", "int8")])
def test_turns_alternate_and_are_balanced(contestants: tuple[str, ...]) -> None:
    order = list(turns(contestants, 4))
    assert Counter(name for _, name in order) == dict.fromkeys(contestants, 4)
    names = [name for _, name in order]
    assert names[: 2 * len(contestants)] == [*contestants, *reversed(contestants)]
    # The sum of positions is the same for all: a drift that is linear in time favours nobody.
    places = {who: sum(at for at, name in enumerate(names) if name == who) for who in contestants}
    assert len(set(places.values())) == 1
    assert [number for number, _ in order] == sorted(number for number, _ in order)


def test_prompts_are_equal_for_all_and_new_for_every_run() -> None:
    seen = set()
    for scenario in (*libraries.SCENARIOS, *vllm.SCENARIOS, *vllm.CHUNKED):
        for number in (WARM_UP, 0, 1):
            prompts = token_prompts(scenario, number)
            assert prompts == token_prompts(scenario, number)
            assert [len(prompt) for prompt in prompts] == [scenario.length] * scenario.rows
            seen |= {tuple(prompt[:4]) for prompt in prompts}
            texts = text_prompts(scenario, number)
            assert texts == text_prompts(scenario, number)
            assert {len(text.split()) for text in texts} == {scenario.length}
    runs = sum(3 * scenario.rows for scenario in (*libraries.SCENARIOS, *vllm.SCENARIOS, *vllm.CHUNKED))
    # The same scenario of both lists has the same prompts; no other two have a beginning in common.
    again = {s.name for s in libraries.SCENARIOS} & {s.name for s in vllm.SCENARIOS}
    assert len(seen) == runs - sum(3 * s.rows for s in vllm.SCENARIOS if s.name in again)


def test_warm_up_has_the_same_shapes_on_other_prompts() -> None:
    warm = DECODE.shortened()
    assert (warm.rows, warm.length, warm.tokens) == (2, 16, WARM_UP_TOKENS)
    assert PREFILL.shortened() == PREFILL
    assert token_prompts(warm, WARM_UP) != token_prompts(DECODE, 0)


def test_medians_and_ratios() -> None:
    figures = {
        "peer": [Figure(rate, 100) for rate in (10.0, 30.0, 20.0)],
        "ours": [Figure(rate, 100) for rate in (50.0, 41.0, 10.0, 39.0)],
    }
    found = row("decode", 8, True, "peer", figures)
    assert found.medians == {"peer": 20.0, "ours": 40.0}
    assert found.ratios == {"ours": 2.0}
    assert found.runs["peer"] == [10.0, 30.0, 20.0]
    assert found.milliseconds("ours") == 200.0
    assert row("prefill", 1, False, "peer", figures).milliseconds("ours") is None


def test_notes_say_what_casts_doubt() -> None:
    counted = row("a", 1, True, "peer", {"peer": [Figure(1, 5)], "ours": [Figure(1, 6)]})
    alike = row("b", 1, True, "peer", {"peer": [Figure(1, 5)], "ours": [Figure(1, 5)]})
    assert notes([alike], {"peer": 0.01}) == []
    first, second = notes([counted, alike], {"peer": 0.5, "ours": 0.01})
    assert first.startswith("a: ")
    assert "5" in first
    assert "6" in first
    assert second == "peer took 50% of a core while others ran: it disturbed them"


class Counting:
    """A contestant whose runs are written down; it uses CPU while others run if it is `restless`."""

    def __init__(self, name: str, log: list[tuple[str, str, int]], restless: float = 0.0) -> None:
        self.facts = Facts(name, "1", {})
        self._log = log
        self._used = 0.0
        self._restless = restless

    def warm_up(self, scenario: Scenario) -> None:
        self.run(scenario, WARM_UP)

    def run(self, scenario: Scenario, number: int) -> Figure:
        self._log.append((self.facts.name, scenario.name, number))
        if scenario.length == 666:
            raise PeerFailed(f"{self.facts.name}: no")
        return Figure(10.0 + number, scenario.length)

    def cpu_seconds(self) -> float:
        self._used += self._restless
        return self._used


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentserve.bench.compare.contest.SETTLE_SECONDS", 0.0)


@pytest.mark.usefixtures("hasty")
def test_everybody_warms_up_then_runs_in_turn() -> None:
    log: list[tuple[str, str, int]] = []
    said: list[Row] = []
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
def test_the_first_failure_ends_it() -> None:
    log: list[tuple[str, str, int]] = []
    with pytest.raises(PeerFailed, match="peer: no"):
        measure([Counting("peer", log)], [Scenario("prefill", 1, 666), PREFILL], 1, Idle(), lambda row: None)
    assert len(log) == 1


def stream(sent: float, *marks: tuple[float, int], prompt: int = 10) -> Stream:
    return Stream(sent, list(marks), prompt_tokens=prompt)


def test_decode_counts_while_all_streams_decode() -> None:
    one = stream(0, (1.0, 1), (2.0, 2), (3.0, 4))
    assert decode_rate([one]) == pytest.approx(3 / 2)  # the first token belongs to the prefill
    other = stream(0, (2.0, 1), (2.5, 2), (3.0, 3), (9.0, 4))
    # From 2.0 (the second one's first token) to 3.0 (the first one's last): 2 tokens each.
    assert decode_rate([one, other]) == pytest.approx(4.0)
    assert decode_rate([one, stream(0, (3.0, 1), (4.0, 2))]) is None
    assert decode_rate([stream(0, (1.0, 5))]) is None


def test_prefill_lasts_until_everyone_has_a_token() -> None:
    assert prefill_rate([stream(1.0, (1.5, 1), prompt=100)]) == pytest.approx(200)
    pair = [stream(1.0, (1.5, 1), prompt=100), stream(1.2, (2.0, 1), prompt=60)]
    assert prefill_rate(pair) == pytest.approx(160)


def test_a_stream_believes_the_running_count() -> None:
    found = Stream(0.0)
    for now, tokens in enumerate((0, 1, 1, 3)):
        details = {"cached_tokens": 2}
        found.heard(now, {"completion_tokens": tokens, "prompt_tokens": 9, "prompt_tokens_details": details})
    found.heard(9, {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": None})
    assert found.marks == [(1, 1), (3, 3)]
    assert (found.tokens, found.prompt_tokens, found.cached_tokens) == (3, 9, 0)


def event(tokens: int) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %d, "prompt_tokens": 9}}\r\n\r\n' % tokens


def test_events_have_the_time_at_which_they_were_whole() -> None:
    first, second = event(1), event(2)
    pieces = [
        (1.0, b": comment\n" + first),
        (2.0, second[:30]),
        (3.0, second[30:] + event(4)),
        (4.0, b"data: [DONE]\n"),
    ]
    assert Stream.of(0.5, pieces) == Stream(0.5, [(1.0, 1), (3.0, 2), (3.0, 4)], prompt_tokens=9)
    with pytest.raises(BrokenStream, match="broke off"):
        Stream.of(0.5, pieces[:3])
    with pytest.raises(BrokenStream, match="no memory"):
        Stream.of(0.5, [*pieces[:3], (4.0, b'data: {"error": {"message": "no memory"}}\n')])


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
    assert llamacpp.NOTES == ("decode, 8 x 2000 tokens: left out, the peer's prefill takes minutes",)


def test_arguments_for_the_servers() -> None:
    assert vllm.core_list({1, 0}) == "0-1"
    assert vllm.core_list({3}) == "3"
    assert vllm.core_list({0, 2, 5}) == "0,2,5"
    assert vllm.as_arguments({"max_batched_tokens": "256"}) == ["--max-batched-tokens", "256"]


@pytest.mark.parametrize("peer", sorted(compare.PEERS))
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
    yield [Counting("openvino", log), Counting("agentserve", log)]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fails", [False, True])
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stages = (compare.Stage(made_up, [DECODE]), compare.Stage(partial(made_up, fails=fails), [PREFILL]))
    monkeypatch.setitem(compare.PEERS, "openvino", compare.Peer(stages, ("half a note",)))
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
    assert (found["peer"]["name"], found["ours"][0]["name"]) == ("openvino", "agentserve")
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
        compare.compare("vllm", settings(tmp_path), runs=1, only="chess", command="", say=lambda row: None)


def test_the_report_is_json(tmp_path: Path) -> None:
    found = row("decode", 1, True, "peer", {"peer": [Figure(2.0, 5)], "ours": [Figure(3.0, 5)]})
    peer, ours = Facts("peer", "1.2", {"threads": 2}), Facts("ours", "3", {})
    whole = Comparison("compare-peer", "command", {"cores": "2"}, {}, peer, [ours], [found], {"peer": 0.0})
    path = report.write(whole, tmp_path / "new")
    assert path.name == "compare-peer.json"
    read = json.loads(path.read_text())
    assert read["rows"][0]["ratios"] == {"ours": 1.5}
    assert read["rows"][0]["runs"] == {"peer": [2.0], "ours": [3.0]}
    assert read["peer"] == {"name": "peer", "version": "1.2", "settings": {"threads": 2}}


def test_descendants_are_read_from_proc(tmp_path: Path) -> None:
    for process, parent, name in ((5, 1, "a"), (6, 5, "b) R 1 ("), (7, 6, "c"), (8, 1, "d")):
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "stat").write_text(f"{process} ({name}) S {parent} 0 0")
    (tmp_path / "9").mkdir()  # it has ended while we looked
    assert sorted(keeper.descendants(5, tmp_path)) == [6, 7]
    assert list(keeper.descendants(7, tmp_path)) == []
