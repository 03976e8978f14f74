"""`agentserve bench outside --tool giraffe`: what the suite is told, and what is made of its report."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from agentserve.bench.outside.giraffe import CHECKS, PLANS, Subject, aborted, check, configuration
from agentserve.bench.outside.tools import ToolFailed
from agentserve.bench.outside.verdicts import Checked, Verdict, shown, verdicts
from agentserve.bench.report import write
from agentserve.cli.main import app
from tests.api_rig import Rig, served
from tests.fakes import ScriptedEngine, say

FAKE_GIRAFFE = """#!{python}
import json, pathlib, sys, urllib.request
flags = dict(zip(sys.argv, sys.argv[1:]))
asked = json.loads(pathlib.Path(flags["--config"]).read_text())
target = asked["targets"][0]
body = json.dumps({{"model": target["model"], "messages": [{{"role": "user", "content": "hi"}}]}})
request = urllib.request.Request(
    target["url"] + "/chat/completions", body.encode(), {{"content-type": "application/json"}}
)
said = json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
there = pathlib.Path(flags["--output"])
there.mkdir()
one = {{"scenario": "initial", "check_ids": ["access"], "score": said == "Hello.", "score_message": said,
       "intentional": False, "status": "completed", "valid": {valid}, "error": None, "tool_evaluation": None}}
checks = [{{"id": name, "status": "pass", "metrics": {metrics}}} for name in {checks}]
found = {{"checks": checks, "requests": [one]}}
if {report}:
    (there / "report.json").write_text(json.dumps(found))
sys.exit(1)
"""


def environment(
    folder: Path, *, report: bool = True, checks: Sequence[str] = ("access",), valid: bool = True
) -> Path:
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "giraffe"
    program.write_text(
        FAKE_GIRAFFE.format(
            python=sys.executable, report=report, checks=list(checks), metrics=FOUND | IN_ORDER, valid=valid
        ),
        encoding="utf-8",
    )
    program.chmod(0o755)
    return folder


def request(scenario: str, *checks: str, **changes: Any) -> dict[str, Any]:
    """One of giraffe's records, right and whole."""
    plain = {
        "scenario": scenario,
        "check_ids": list(checks),
        "score": True,
        "score_message": "Answer matches the fixture.",
        "intentional": False,
        "status": "completed",
        "valid": True,
        "error": None,
        "tool_evaluation": None,
    }
    return plain | changes


def of(
    check: str, status: str, metrics: dict[str, Any], *requests: dict[str, Any], ended: int = 0
) -> Verdict:
    report = {"checks": [{"id": check, "status": status, "metrics": metrics}], "requests": list(requests)}
    (found,) = verdicts(report, "s", "p", [check], ended)
    return found


FOUND = {
    "cache_repeat_misses": {"misses": 0, "observed": 5, "planned": 5},
    "cache_reuse_samples": 5,
    "cache_controls_discriminative": True,
}
IN_ORDER = {
    "stop_enforcement": {"status": "inconclusive"},
    "followup_delay": {"delayed": False},
}
WRONG = request("x", "prefix", "cancellation", "tools", score=False, score_message="Expected A; received B.")
LEFT = request("client_cancel", "cancellation", score=None, status="cancelled", valid=False, intentional=True)


@pytest.mark.parametrize(
    ("found", "cause", "told"),
    [
        (of("prefix", "pass", FOUND, request("x", "prefix")), "", ()),
        (of("prefix", "fail", FOUND, WRONG), "model", ("x: Expected A; received B.",)),
        (of("prefix", "inconclusive", FOUND, request("x", "prefix")), "open", ()),
        (of("cancellation", "pass", IN_ORDER, LEFT, ended=None), "", ()),
        (
            of("cancellation", "fail", IN_ORDER, WRONG, LEFT, ended=1),
            "model",
            ("x: Expected A; received B.",),
        ),
        (
            of("tools", "inconclusive", {}, request("t", "tools", score=None, score_message="Cut.")),
            "model",
            ("t: Cut.",),
        ),
    ],
)
def test_what_only_answers_explain_is_the_models(found: Verdict, cause: str, told: tuple[str, ...]) -> None:
    assert (found.cause, found.wrong, found.faults) == (cause, told, ())


CHOICE = {"choice": {"status": "fail", "message": "No call."}, "protocol": {"status": "pass", "message": ""}}


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (
            of("access", "pass", {}, request("a", "access", status="failed", error="HTTP 500")),
            "a: failed: HTTP 500",
        ),
        (of("access", "pass", {}, request("a", "access", valid=False)), "a: completed: None"),
        (of("tools", "fail", {}, request("t", "tools", score=False, tool_evaluation=CHOICE)), "t: No call."),
        (
            of(
                "prefix",
                "fail",
                FOUND
                | {
                    "cache_repeat_misses": {"misses": 2, "observed": 5, "planned": 5},
                    "cache_reuse_samples": 3,
                },
                WRONG,
            ),
            "the prefix was found in 3 of 5 repeats",
        ),
        (
            of("prefix", "pass", FOUND | {"cache_controls_discriminative": False}),
            "prompts that nobody sent before",
        ),
        (
            of("cancellation", "fail", IN_ORDER | {"output_cap_violations": ["r"]}, WRONG),
            "1 answers are longer",
        ),
        (
            of("cancellation", "fail", IN_ORDER | {"stop_enforcement": {"status": "fail"}}, WRONG),
            "behind its stop",
        ),
        (of("cancellation", "pass", IN_ORDER | {"followup_delay": {"delayed": True}}), "were late"),
        (of("cancellation", "pass", IN_ORDER, LEFT), "0 of 1 turns whose clients left were ended"),
    ],
)
def test_what_no_answer_explains_is_the_servers(found: Verdict, fault: str) -> None:
    assert found.cause == "server"
    assert fault in found.faults[0]


def test_a_check_passes_if_it_does_where_answers_are_held() -> None:
    def verdict(check: str, plan: str, cause: str) -> Verdict:
        return Verdict("s", plan, check, "", 0, 0, cause)

    found = [
        verdict("access", "first", ""),
        verdict("tools", "first", "model"),
        verdict("tools", "held", ""),
        verdict("prefix", "first", "model"),
        verdict("prefix", "held", "open"),
        verdict("sessions", "first", ""),
        verdict("sessions", "held", "server"),
        verdict("serving", "first", "open"),
    ]
    assert shown(found, "s") == {
        "access": "pass",
        "tools": "pass, held",
        "prefix": "model",
        "sessions": "server",
        "serving": "open",
    }


COUNTED = """agentserve_turns_total{finish_reason="stop"} 5.0
agentserve_turns_total{finish_reason="aborted"} 3.0
"""
NOT_COUNTED = 'vllm:request_success_total{finished_reason="abort"} 0.0'


async def test_turns_that_clients_left_are_the_servers_own_count() -> None:
    def shows(text: str) -> Starlette:
        return Starlette(routes=[Route("/metrics", lambda request: Response(text))])

    rig = Rig(ScriptedEngine(say("Hello.")))
    for shown_app, count in ((rig.app, 0), (shows(COUNTED), 3), (shows(NOT_COUNTED), None)):
        async with served(shown_app) as url:
            assert await asyncio.to_thread(aborted, url) == count


async def test_a_plan_is_run_and_its_report_read(tmp_path: Path) -> None:
    there = environment(tmp_path / "tool")
    rig = Rig(ScriptedEngine(say("Hello.")))
    plan = PLANS[0].__class__("as it comes", "", ("access",))
    async with served(rig.app) as url:
        subject = Subject("s", url, "tiny")
        (found,) = await asyncio.to_thread(check, plan, subject, there, tmp_path)
        bare = environment(tmp_path / "bare", report=False)
        with pytest.raises(ToolFailed, match="left no result"):
            await asyncio.to_thread(check, plan, Subject("other", url, "tiny"), bare, tmp_path)
    assert found == Verdict("s", "as it comes", "access", "pass", 1, 1, "")


def test_results_of_other_servers_are_kept(tmp_path: Path) -> None:
    def run(server: str, version: str) -> Checked:
        verdict = Verdict(server, "p", "access", "pass", 1, 1, "")
        return Checked("b", {server: version}, {}, {}, "m", {server: version}, {"p": ""}, [verdict])

    for server, version in (("a", "1"), ("b", "1"), ("a", "2")):
        write(run(server, version).beside(tmp_path), tmp_path)
    kept = json.loads((tmp_path / "b.json").read_bytes())
    assert kept["servers"] == kept["commands"] == {"a": "2", "b": "1"}
    assert sorted(verdict["server"] for verdict in kept["verdicts"]) == ["a", "b"]
    (tmp_path / "b.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="Expected"):
        run("a", "1").beside(tmp_path)


async def test_the_command_checks_a_peer_and_keeps_what_it_found(tmp_path: Path) -> None:
    environment(tmp_path / "giraffe", checks=CHECKS)
    rig = Rig(ScriptedEngine(say("Hello.")))
    async with served(rig.app) as url:
        arguments = ["--tool", "giraffe", "--tools-dir", str(tmp_path), "--model", "tiny"]
        arguments += ["--peer", f"other={url}", "--results", str(tmp_path)]
        result = await asyncio.to_thread(CliRunner().invoke, app, ["bench", "outside", *arguments])
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "outside-giraffe-tiny.json").read_bytes())
    assert list(kept["servers"]) == ["other"]
    assert len(kept["verdicts"]) == sum(len(plan.checks) for plan in PLANS)
    assert {verdict["status"] for verdict in kept["verdicts"]} == {"pass"}


async def test_a_fault_of_the_server_is_the_commands_status(tmp_path: Path) -> None:
    environment(tmp_path / "giraffe", checks=CHECKS, valid=False)
    rig = Rig(ScriptedEngine(say("Hello.")))
    async with served(rig.app) as url:
        arguments = ["--tool", "giraffe", "--tools-dir", str(tmp_path), "--model", "tiny", "--url", url]
        result = await asyncio.to_thread(CliRunner().invoke, app, ["bench", "outside", *arguments])
    assert result.exit_code == 1
    assert "no answer of the model is why: access\n" in result.stderr
    assert "initial: completed: None" in result.output


def test_every_check_runs_as_it_comes_and_what_is_held_is_said() -> None:
    first, *others = (configuration(plan, Subject("s", "http://x", "m")) for plan in PLANS)
    assert first["checks"] == list(CHECKS)
    assert "request_options" not in first
    assert "tool_checks" not in first
    assert all("request_options" in held or "tool_checks" in held for held in others)
    assert len({json.dumps(settings) for settings in (first, *others)}) == len(PLANS)


def test_a_path_is_no_name_for_a_result(tmp_path: Path) -> None:
    arguments = ["--tool", "giraffe", "--tools-dir", str(tmp_path), "--model", str(tmp_path / "m.gguf")]
    result = CliRunner().invoke(app, ["bench", "outside", *arguments])
    assert result.exit_code == 1
    assert "give --served-name" in result.stderr
