"""`agentserve bench outside`: what the load generators are told, and what is made of their results."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from agentserve.bench.outside import tokenizer
from agentserve.bench.outside.abench import Abench
from agentserve.bench.outside.aiperf import Aiperf, recording
from agentserve.bench.outside.run import Place, failed, replay_all, version
from agentserve.bench.outside.tokenizer import tokenizer_folder
from agentserve.bench.outside.tools import Came, Load, Replay, ToolFailed, run
from agentserve.bench.report import Row
from agentserve.cli.main import app
from agentserve.text import load as load_text
from tests.api_rig import Rig, served
from tests.fakes import ScriptedEngine, say
from tests.unit.test_text_gguf import small

LOAD = Load("tiny", agents=2, lanes=2, turns=3, output=8, wait=0.5, seconds=9, seed=1)
STREAMED, WHOLE = Replay("chat", True), Replay("chat", False)

FAKE_ABENCH = """#!{python}
import json, sys, urllib.request
flags = dict(zip(sys.argv, sys.argv[1:]))
turns = []
for n in range(3):
    body = json.dumps({{"model": flags["--model"], "messages": [{{"role": "user", "content": "hi"}}]}})
    request = urllib.request.Request(
        flags["--base-url"] + "/v1/chat/completions", body.encode(), {{"content-type": "application/json"}}
    )
    urllib.request.urlopen(request).read()
    turns.append({{"success": n != {bad}, "ttft": 0.25, "latency": 0.5}})
with open(flags["--output-file"], "w") as file:
    file.write(json.dumps({{"sessions": [{{"turns": turns}}, {{"turns": turns}}]}}))
"""


def environment(folder: Path, text: str) -> Path:
    (folder / "bin").mkdir()
    program = folder / "bin" / "abench"
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    (folder / "lib/python3.0/site-packages/agentic_bench-7.0.dist-info").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("bad", [-1, 1])
async def test_a_tool_replays_and_its_failures_are_counted(tmp_path: Path, bad: int) -> None:
    there = environment(tmp_path, FAKE_ABENCH.format(python=sys.executable, bad=bad))
    rig = Rig(ScriptedEngine(say("Hello.")))
    said: list[str] = []
    async with served(rig.app) as url:
        place = Place(there, url, tmp_path, tmp_path)
        rows, found = await asyncio.to_thread(replay_all, Abench(), LOAD, place, said.append)
    assert (len(rig.engine.submits), found) == (6, "7.0")
    values = {(row.group, row.name): row.value for row in rows}
    assert values["chat, streamed", "requests"] == values["chat, whole", "requests"] == 6
    assert values["chat, streamed", "failed"] == (0 if bad < 0 else 2)
    assert values["chat, streamed", "first token, P50"] == 250
    assert ("chat, whole", "first token, P50") not in values
    assert values["chat, whole", "prompt tokens, with what warms up"] > 0
    assert failed(rows) == (bad >= 0)
    assert said == ["abench: chat, streamed ...", "abench: chat, whole ..."]


def test_nothing_that_was_sent_is_a_failure() -> None:
    assert failed([Row("requests", 0, ""), Row("failed", 0, "")])
    assert not failed([Row("requests", 1, ""), Row("failed", 0, "")])


def test_turns_that_abench_did_not_send_have_failed(tmp_path: Path) -> None:
    turn = {"success": True, "ttft": 0.1, "latency": 0.2}
    written = json.dumps({"sessions": [{"turns": [turn] * 3}, {"turns": [turn]}]})
    (tmp_path / "abench-chat-streamed.jsonl").write_text(written, encoding="utf-8")
    assert Abench().read(STREAMED, LOAD, tmp_path) == Came(6, 2, 100.0, 200.0)


AIPERF: dict[str, Any] = {
    "aiperf_version": "0.13.0",
    "request_count": {"avg": 9.0},
    "completed_request_count": {"avg": 9.0},
    "request_latency": {"p50": 7.0},
    "time_to_first_token": {"p50": 3.0},
    "was_cancelled": False,
    "is_complete": True,
    "error_summary": [],
}


@pytest.mark.parametrize(
    ("changes", "came"),
    [
        ({}, Came(9, 0, 3.0, 7.0, "0.13.0")),
        ({"completed_request_count": {"avg": 11.0}}, Came(11, 2, 3.0, 7.0, "0.13.0")),
        ({"error_summary": [{"count": 1}]}, Came(9, 1, 3.0, 7.0, "0.13.0")),
        ({"was_cancelled": True}, Came(9, 1, 3.0, 7.0, "0.13.0")),
        ({"is_complete": False}, Came(9, 1, 3.0, 7.0, "0.13.0")),
        (
            {
                "overall_usage_prompt_cache_read_pct": {"avg": 70.5},
                "theoretical_prefix_cache_hit": {"avg": 71.0},
            },
            Came(9, 0, 3.0, 7.0, "0.13.0", 70.5, 71.0),
        ),
    ],
)
def test_what_aiperf_says_of_its_run(tmp_path: Path, changes: dict[str, Any], came: Came) -> None:
    folder = tmp_path / "aiperf-chat-streamed"
    folder.mkdir()
    (folder / "profile_export_aiperf.json").write_text(json.dumps(AIPERF | changes), encoding="utf-8")
    assert Aiperf().read(STREAMED, LOAD, tmp_path) == came


@pytest.mark.parametrize("tool", [Abench(), Aiperf()])
def test_a_tool_that_leaves_no_result_has_failed(tmp_path: Path, tool: Any) -> None:
    with pytest.raises(ToolFailed, match="left no result"):
        tool.read(WHOLE, LOAD, tmp_path)


def test_a_recorded_agent_goes_on_from_its_own_requests() -> None:
    found = recording(random.Random(1), LOAD, 3)
    requests: Any = found["requests"]
    assert len(requests) == LOAD.turns
    for before, after in pairwise(requests):
        assert after["hash_ids"][: len(before["hash_ids"])] == before["hash_ids"]
        assert after["in"] >= before["in"] + LOAD.output
        assert after["t"] == pytest.approx(before["t"] + before["api_time"] + after["think_time"], abs=0.01)
    assert found == recording(random.Random(1), LOAD, 3)
    other: Any = recording(random.Random(1), LOAD, 4)["requests"]
    assert not set(requests[-1]["hash_ids"]) & set(other[-1]["hash_ids"])


def test_aiperf_reads_the_recordings_that_were_prepared(tmp_path: Path) -> None:
    tool = Aiperf()
    tool.prepare(LOAD, tmp_path / "tokenizer", tmp_path)
    command = tool.command(WHOLE, LOAD, "http://x", tmp_path)
    traces = Path(command[command.index("--input-file") + 1])
    assert sorted(path.name for path in traces.iterdir()) == ["agent-0.json", "agent-1.json"]
    assert str(tmp_path / "tokenizer") in command
    assert "--streaming" not in command
    assert "--streaming" in tool.command(STREAMED, LOAD, "http://x", tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [("#!/bin/sh\necho oh; exit 3\n", "status 3.*oh"), ("#!/bin/sh\nsleep 60\n", "longer than 0 s")],
)
def test_a_tool_that_fails_is_told_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    there = environment(tmp_path, text)
    with pytest.raises(ToolFailed, match=told):
        run(there, ["abench"], tmp_path / "log", 0.3)
    with pytest.raises(ToolFailed, match="not there; `make outside`"):
        run(there, ["aiperf"], tmp_path / "log", 0.3)
    assert version(there, "aiperf") == "unknown"


def test_without_its_environment_the_command_says_so(tmp_path: Path) -> None:
    arguments = ["--tools-dir", str(tmp_path), "--url", "http://127.0.0.1:9", "--tokenizer", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "outside", *arguments])
    assert result.exit_code == 1
    assert "Connection refused" in result.stderr


@pytest.mark.model
def test_the_models_tokenizer_as_a_folder(tmp_path: Path) -> None:
    from agentserve.models.source import resolve

    folder = tokenizer_folder("smollm2-135m", tmp_path / "t")
    ours = load_text(resolve("smollm2-135m").path).tokenizer
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Sessions wait 21 times; tools take their time. naïve – 你好\n\tx = 1"
    assert theirs.encode(text).ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text


def test_a_folder_is_its_own_tokenizer_and_other_vocabularies_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert tokenizer_folder(str(tmp_path), tmp_path / "t") == tmp_path
    file = tmp_path / "m.gguf"
    file.touch()
    monkeypatch.setattr(tokenizer, "read_metadata", lambda path: small())
    with pytest.raises(ToolFailed, match=r"m\.gguf: its vocabulary is not byte-level; give --tokenizer"):
        tokenizer_folder(str(file), tmp_path / "t")
    assert not (tmp_path / "t").exists()
