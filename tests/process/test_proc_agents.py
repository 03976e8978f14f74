"""Agents' sessions on a real server with the real model: `kill -9` while they wait, Python tools."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents_machine import shown
from tests.agents_rig import SESSIONS, WEATHER, result
from tests.process.serving import url_of
from tests.process.test_proc_launch import gone, until

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0
TOOLS = '''
import agentserve

@agentserve.tool
def clock(zone: str = "UTC") -> str:
    """What time it is."""
    return f"12:34 in {zone}"
'''
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}


def agent(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "smollm2-135m",
        "instructions": "You are brief.",
        "tools": list(tools),
        "temperature": 0,
        "max_output_tokens": 48,
        "tool_choice": {"type": "function", "function": {"name": name}},
    }


class Machine:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "some_tools.py").write_text(TOOLS)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "agentserve", "serve", "--port", "0", "--device-kv", "64MiB"]
        command += ["--threads", "1", "--log-level", "warning", "--data-dir", str(self._folder / "data")]
        command += ["--tools", "some_tools"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.client = httpx.Client(base_url=url_of(self.process), timeout=LIMIT)

    def kill(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        workers = [int(pid) for pid in children.read_text().split()]
        self.close()
        until(lambda: all(gone(pid) for pid in workers))

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def create(self, config: dict[str, Any], given: str) -> str:
        body = {"environment": {"type": "none"}, "agent": config, "input": given}
        reply = self.client.post(SESSIONS, json=body)
        assert reply.status_code == 200, reply.text
        id_: str = reply.json()["id"]
        return id_

    def send(self, id_: str, *events: Any) -> None:
        reply = self.client.post(f"{SESSIONS}/{id_}/events", json={"events": events})
        assert reply.status_code == 202, reply.text

    def wait(self, id_: str, *statuses: str) -> Any:
        ends = time.monotonic() + LIMIT
        while True:
            session = self.client.get(f"{SESSIONS}/{id_}").json()
            if session["status"] in statuses:
                return session
            assert time.monotonic() < ends
            time.sleep(0.02)

    def items(self, id_: str) -> list[Any]:
        data: list[Any] = self.client.get(f"{SESSIONS}/{id_}/items?order=asc").json()["data"]
        return data


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    made = Machine(tmp_path)
    yield made
    made.close()


def test_a_session_that_waits_goes_on_bit_exactly_after_a_kill(machine: Machine) -> None:
    m = machine
    config = agent("weather", {**WEATHER, "parameters": CITY}, {"type": "python", "name": "clock"})
    _python_function(m)
    one, two = (m.create(config, "What is the weather in Rome?") for _ in range(2))
    for id_ in (one, two):
        (call,) = m.wait(id_, "requires_action")["required_actions"]
        assert call["name"] == "weather"
        if id_ == one:
            m.send(id_, result(call, "sunny, 24 degrees"))
            m.wait(id_, "idle")
    before = m.items(two)
    three = m.create(config, "And in Oslo?")
    m.kill()  # no farewell
    m.start()
    assert m.wait(three, "requires_action")["required_actions"][0]["name"] == "weather"  # made again
    assert m.items(two) == before
    assert m.wait(two, "requires_action")["required_actions"] == [call]
    m.send(two, result(call, "sunny, 24 degrees"))
    m.wait(two, "idle")
    assert shown(m.items(two)) == shown(m.items(one))
    m.send(two, result(call, "sunny, 24 degrees"))  # a repeat, to the end of time
    turns = [m.client.get(f"{SESSIONS}/{id_}/turns").json()["data"] for id_ in (one, two)]
    assert turns[0][0]["status"] == turns[1][0]["status"]
    assert turns[1][0]["usage"]["output_tokens"] == turns[0][0]["usage"]["output_tokens"]


def _python_function(m: Machine) -> None:
    id_ = m.create(agent("clock", {"type": "python", "name": "clock"}), "What time is it?")
    m.wait(id_, "idle")
    items = m.items(id_)
    assert [item["type"] for item in items[:3]] == ["message", "function_call", "function_call_output"]
    assert items[2]["output"].startswith("12:34 in ")
    assert m.client.get("/openapi.json").json()["paths"][SESSIONS + "/{id}/events"]["post"]["requestBody"]
