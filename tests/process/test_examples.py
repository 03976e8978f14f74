"""The examples as a user runs them: as scripts, against a real server with the real model."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mcp_rig import needs_mcp
from tests.process.serving import serving
from tests.process.test_api_real import url  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.process, pytest.mark.model]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, url: str) -> str:  # noqa: F811
    command = [sys.executable, str(EXAMPLES / name), url]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_tool_session(url: str) -> None:  # noqa: F811
    said = run("tool_session.py", url)
    assert said.startswith("call: weather({")
    prompt, cached = (int(word) for word in said.rsplit("resume: ", 1)[1].split() if word.isdigit())
    assert cached > 150
    assert prompt - cached < 60


def test_anthropic_sdk(url: str) -> None:  # noqa: F811
    said = run("anthropic_sdk.py", url)
    prompt, call, *_, resume = said.splitlines()
    size = int(prompt.split()[1])
    assert call.startswith("call: weather({'city': '")
    assert int(call.split()[-2]) > 2
    found, computed = (int(word) for word in resume.split() if word.isdigit())
    assert found > size
    assert computed < 60


def test_openai_responses(url: str) -> None:  # noqa: F811
    said = run("openai_responses.py", url)
    assert said.startswith("call: weather({")
    prompt, cached = (
        int(word) for word in said.rsplit("resume: ", 1)[1].splitlines()[0].split() if word.isdigit()
    )
    assert cached > 150
    assert prompt - cached < 60
    assert said.rsplit("background: ", 1)[1].split(",")[0] in ("completed", "incomplete")


def test_langgraph_agent(url: str) -> None:  # noqa: F811
    said = run("langgraph_agent.py", url)
    kinds = [
        line.split(":")[0] for line in said.splitlines() if line.split(":")[0] in ("human", "ai", "tool")
    ]
    assert kinds[:4] == ["human", "ai", "tool", "ai"]


def test_agents_sessions(url: str) -> None:  # noqa: F811
    said = run("agents_sessions.py", url)
    assert said.startswith("call: weather(")
    words = said.rsplit("tokens: ", 1)[1].splitlines()[0].split()
    told, cached = (int(word) for word in words if word.isdigit())
    assert cached > told / 2 - 60  # of two model calls the second computes the tool's result only
    turns = said.rsplit("turns: ", 1)[1].splitlines()[0].split(", ")
    assert turns[0] in ("completed", "failed")  # failed: its tokens did not last for the answer
    assert turns[1] == "cancelled"
    items = said.rsplit("items: ", 1)[1].splitlines()[0].split(", ")
    assert items[:4] == ["message", "function_call", "function_call_output", "message"]


@needs_mcp
def test_mcp_tool(url: str) -> None:  # noqa: F811
    said = run("mcp_tool.py", url)
    assert said.startswith("approve: station.departures({'city': ")
    assert "\nresult: completed: " in said
    session, _, response = said.partition("in a response: departures({")
    assert "12:10 to the airport" in session
    assert ": completed: " in response
    assert "12:10 to the airport" in response


def test_webhook_tool() -> None:
    flags = ("--device-kv", "64MiB", "--allow-private-callbacks")
    with serving(*flags, patience=240.0) as (client, _):
        said = run("webhook_tool.py", str(client.base_url)).splitlines()
    calls = [line for line in said if line.startswith("call: weather(")]
    assert [call.rpartition(", ")[2] for call in calls] == ["at once", "later"]
    assert "posted: 202" in said
    results = [line for line in said if line.startswith("result: ")]
    assert [result.endswith(": sunny, 24 degrees") for result in results] == [True, True]


# The client of our own waits for a server: it may be starting.
SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem != "client_agent"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_without_a_server_they_say_so_in_one_line(path: Path) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, str(path), nobody]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    line = finished.stderr.splitlines()[-1]  # a library may say that it tries again
    assert line.startswith(f"No server at {nobody}: start one first")
