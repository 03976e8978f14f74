"""`agentserve sessions` against a server behind a real socket, and what it draws."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from agentserve.cli.main import app
from agentserve.cli.session_view import ago, bar, listing, place, plain, story, waits
from agentserve.cli.sessions import ask
from agentserve.messages import Decided, SessionView
from agentserve.types import SessionId, SessionState, TurnId
from tests.api_rig import TOOLS, Rig, hermes, served, user
from tests.fakes import ScriptedEngine, say
from tiering.policy.base import Residency

HOSTILE = "evil\x1b[2J\n[bold]x[/bold]"


def view(session: SessionId, at: float) -> SessionView:
    return SessionView(
        session, SessionState.WAITING_TOOL, TurnId(1), 70, 64, 4, 0,
        residency=Residency(device=1, host=2, disk=0, gone=1, copied=1), rested=at, tools=("weather",),
        decision="host", reason="a long wait", price=0.25, until=at + 3600.0,
        decisions=(
            Decided(at + 1.0, "hold", "back soon", 0.5, Residency(4, 0, 0, 0)),
            Decided(at + 2.0, "host", "a long wait", 0.25, Residency(1, 2, 0, 1, 1)),
        ),
    )  # fmt: skip


@pytest.fixture
async def rig() -> AsyncIterator[tuple[Rig, str]]:
    """A server with a session that waits for a tool, and one that is idle."""
    rig = Rig(ScriptedEngine(say(hermes("weather", '{"city": "Rome"}'))))
    await rig.chat([user("a")], tools=TOOLS, session_id="waits")
    rig.engine.reply = say("Hello!")
    await rig.chat([user("b")], session_id="idle")
    name = rig.engine.submits[0].session
    rig.engine.views[name] = view(name, rig.context.clock.now())
    async with served(rig.app) as url:
        yield rig, url


async def run(*arguments: str) -> Result:
    """The command, in a thread: the server is on this one's event loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["sessions", *arguments])


async def test_the_list_says_where_each_sessions_kv_is_and_why(rig: tuple[Rig, str]) -> None:
    result = await run("--url", rig[1])
    assert result.exit_code == 0, result.output
    head, idle, waiting = result.output.splitlines()
    names = "session state turns tokens last turn waits for KV is next look costs s/s decision"
    assert " ".join(head.split()) == names
    assert idle.split()[:3] == ["idle", "IDLE", "1"]
    assert "device" not in idle, "no worker says anything of it"
    assert waiting.split()[:3] == ["waits", "WAITING_TOOL", "1"]
    for part in (" s  weather ", "device 1, host 2, gone 1", "in 60 min", "0.25", "host: a long wait"):
        assert part in waiting


async def test_the_list_as_json_and_its_limit(rig: tuple[Rig, str]) -> None:
    result = await run("--json", "--url", rig[1], "--limit", "1")
    found = json.loads(result.output)
    assert ([session["id"] for session in found["data"]], found["has_more"]) == (["idle"], True)
    assert found["data"][0]["residency"] is None
    shown = (await run("--url", rig[1], "--limit", "1")).output
    assert "... and older ones: this is 1 of 2; --limit shows up to 200" in shown
    assert (await run("--url", rig[1], "--limit", "201")).exit_code == 2


async def test_one_session_is_drawn(rig: tuple[Rig, str]) -> None:
    result = await run("show", "waits", "--url", rig[1])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["waits", "WAITING_TOOL"]
    for state in ("WAITING", "PREFILLING", "DECODING", "WAITING_TOOL"):
        assert any(state in line and "█" in line for line in lines[2:]), state
    assert any(line.split()[:2] == ["weather", "1"] for line in lines)
    for part in (
        "device 1, host 2, gone 1",
        "1 of the blocks on the device have a copy below",
        "decided: host: a long wait (costs 0.25 s per second; looked at again in 60 min)",
        "waits for weather",
    ):
        assert part in result.output
    marks = [line.split() for line in lines if "▲" in line]
    assert [mark[2] for mark in marks] == ["hold", "host"]  # on the timeline, when they were made
    assert marks[0][0] == "0.000" or float(marks[0][0]) < float(marks[1][0])
    at = [n for n, line in enumerate(lines) if line.split()[:2] == ["at", "decided"]]
    first, second = lines[at[0] + 1 : at[0] + 3]
    assert first.split()[1:] == ["s", "hold", "back", "soon", "█" * 20, "device", "4"]
    assert "host     a long wait  █████▓▓▓▓▓▓▓▓▓▓░░░░░ device 1, host 2, gone 1" in second
    shown = json.loads((await run("show", "waits", "--json", "--url", rig[1])).output)
    assert shown["pending_tool_calls"][0]["name"] == "weather"
    assert shown["history"][-1]["tools"] == ["weather"]
    assert [made["choice"] for made in shown["decisions"]] == ["hold", "host"]
    assert shown["decisions"][0]["residency"]["device"] == 4
    assert "no tiers below it" in (await run("show", "idle", "--url", rig[1])).output


async def test_what_is_said_before_show_holds_for_it(rig: tuple[Rig, str]) -> None:
    bare = rig[1].removeprefix("http://")
    result = await run("--url", bare, "--json", "show", "waits")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["id"] == "waits"
    result = await run("--url", "http://127.0.0.1:9", "show", "waits", "--url", bare)
    assert result.output.startswith("waits  WAITING_TOOL")


def test_a_narrow_terminal_shows_what_matters_in_lines_of_their_own() -> None:
    session = {
        "id": "agent-7-task-12", "state": "WAITING_TOOL", "turns": 3, "tokens": 12345,
        "last_active_at": 900.0, "waiting_for": ["grep", "grep", "find"],
        "residency": {"device": 12, "host": 0, "disk": 7, "gone": 0, "copied": 0},
        "decision": {"choice": "disk", "reason": "host is cheapest, a copy is cheap", "price": 1e-6},
    }  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=80).print(listing([session], 1000.0, 80))
    _, row, *more = out.getvalue().splitlines()
    assert row.startswith("agent-7-task-  WAITING_TOOL  ")
    assert "100 s" in row
    assert "disk: host" in row
    assert [line.split() for line in more] == [["12", "disk", "7"]], "nothing of a name is lost"
    out = io.StringIO()
    Console(file=out, width=160).print(listing([session], 1000.0, 160))
    assert out.getvalue().count("\n") == 2
    assert "grep, find" in out.getvalue()


def test_who_was_active_last_comes_first() -> None:
    sessions = [{"id": name, "last_active_at": at} for name, at in (("a", 5.0), ("b", 9.0), ("c", 7.0))]
    lines = drawn(listing(sessions, 10.0)).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["b", "c", "a"]


def test_what_a_silent_worker_told_is_shown_with_its_age() -> None:
    session = {
        "id": "s", "state": "IDLE", "old": True, "as_of": 40.0, "last_active_at": 1.0,
        "residency": {"device": 1, "host": 0, "disk": 0, "gone": 0, "copied": 0},
    }  # fmt: skip
    assert "device 1 (60 s ago)" in drawn(listing([session], 100.0))
    assert "its worker does not answer; it said this 60 s ago" in drawn(*story(session, 100.0))
    never = session | {"as_of": None, "residency": None}
    assert "(worker silent)" in drawn(listing([never], 100.0))
    assert "never said how it is" in drawn(*story(never, 100.0))


async def test_what_goes_wrong_is_one_line(rig: tuple[Rig, str]) -> None:
    for name in ("nobody", "../sessions", "a b?c=d"):
        result = await run("show", name, "--url", rig[1])
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("agentserve: ")
        assert result.stderr.count("\n") == 1
    assert "No session 'nobody'." in (await run("show", "nobody", "--url", rig[1])).stderr
    result = await run("--url", "http://127.0.0.1:9")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("agentserve: cannot talk to http://127.0.0.1:9: ")
    for url in ("nonsense", "http://[", "ftp://x"):
        result = await run("--url", url)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


async def test_the_key_is_sent() -> None:
    keyed = Rig(api_keys=("secret",))
    async with served(keyed.app) as url:
        refused = await run("--url", url)
        assert refused.exit_code == 1
        assert "secret" not in refused.output
        result = await run("--url", url, "--api-key", "secret")
        assert (result.exit_code, result.output) == (0, "no sessions\n")


@pytest.mark.parametrize(
    "response", [httpx.Response(200, text="<html>"), httpx.Response(200, json=[1]), httpx.Response(502)]
)
def test_another_kind_of_server_is_said_to_be_one(
    response: httpx.Response, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ask("http://server", None, "/x", {}, httpx.MockTransport(lambda _: response))
    assert capsys.readouterr().err.startswith("agentserve: ")


def drawn(*parts: Any) -> str:
    console = Console(width=120, highlight=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        for part in parts:
            console.print(part)
        return console.export_text()


def test_names_cannot_write_to_the_terminal() -> None:
    session = {
        "id": HOSTILE, "state": HOSTILE, "parent": HOSTILE, "turns": 1, "tokens": 2, "last_active_at": 5.0,
        "history": [{"state": "WAITING_TOOL", "at": 1.0, "tools": [HOSTILE]}, {"state": HOSTILE, "at": 2.0}],
        "residency": {"device": 1, "host": 0, "disk": 0, "gone": 0, "copied": 0},
        "decision": {"choice": HOSTILE, "reason": HOSTILE, "price": 0.0, "until": None},
        "pending_tool_calls": [{"name": HOSTILE}],
        "decisions": [{"at": 1.0, "choice": HOSTILE, "reason": HOSTILE}],
    }  # fmt: skip
    text = drawn(listing([session], 5.0), *story(session, 5.0))
    assert "\x1b" not in text
    assert "[bold]" in text, "no markup either"
    assert plain("x" * 100) == "x" * 59 + "…"


def test_what_was_said_and_who_is_not_expected_is_shown() -> None:
    out = io.StringIO()
    hints = {
        "expected_wait": None,
        "deadline": 1060.0,
        "priority": 2,
        "final": False,
        "retain": [
            {"start": 0, "end": 64, "priority": 90},
            {"start": 64, "end": None, "priority": 7},
        ],
    }
    for part in story({"id": "s", "hints": hints, "devalued": "abandoned"}, 1000.0):
        Console(file=out, width=120).print(part)
    shown = out.getvalue()
    assert "client says: deadline in 60 s, priority 2, retain tokens 0-64: 90, 64-: 7" in shown
    assert "nobody is expected back: abandoned" in shown
    assert "final" not in shown


def test_waits_are_gathered_by_tool() -> None:
    history = [
        {"state": "WAITING_TOOL", "at": 10.0, "tools": ["grep", "find", "grep"]},
        {"state": "DECODING", "at": 12.0, "tools": []},
        {"state": "WAITING_TOOL", "at": 13.0, "tools": ["grep"]},
        {"state": "IDLE", "at": 13.5},
        {"state": "WAITING_TOOL", "at": 20.0},
    ]
    assert waits(history, 21.0) == {"grep": [2.0, 0.5], "find": [2.0], "?": [1.0]}
    assert waits(history, 19.0)["?"] == [0.0], "clocks differ"
    assert waits([], 1.0) == {}


def test_bars_share_their_columns_by_blocks() -> None:
    residency = msgspec.structs.asdict(Residency(device=10, host=5, disk=4, gone=1))
    assert bar(residency).plain == "█" * 20 + "▓" * 10 + "▒" * 8 + "░" * 2
    assert bar({"device": 1000, "gone": 1}).plain == "█" * 40 + "░", "the least is still seen"
    assert bar({"device": 0}).plain == ""
    assert place({"device": 0}) == "nowhere"
    assert place(None) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0.0 s"), (0.34, "0.3 s"), (42, "42 s"), (600, "10 min"), (7200, "2 h"), (200000, "2 d")],
)
def test_spans_for_people(seconds: float, text: str) -> None:
    assert ago(seconds) == text
