"""Sessions outlive `kill -9` of the server: nothing committed is lost, nothing is there by half, and
what is generated afterwards is what an uninterrupted run generates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.cli.chat import events
from tests.api_rig import CHAT, TOOLS, user
from tests.process.test_proc_launch import gone, until

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0
FORCED = {"type": "function", "function": {"name": "weather"}}
Message = dict[str, Any]


class Machine:
    """A server on one data directory, started again after each of its deaths."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.armed = folder / "armed"
        self.armed.write_text("")
        self.start()

    def start(self) -> None:
        script = Path(__file__).with_name("durable_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(self.data), str(self.armed)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready on "), line
        self.client = httpx.Client(base_url=line.split()[-1], timeout=LIMIT)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.workers = [int(pid) for pid in children.read_text().split()]

    def start_after_death(self) -> None:
        assert self.process.wait(timeout=LIMIT) == -9
        until(lambda: all(gone(pid) for pid in self.workers))
        self.close()
        self.armed.write_text("")
        self.start()

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def body(self, name: str, messages: list[Message], **fields: Any) -> Message:
        return {
            "session_id": name,
            "model": "smollm2-135m",
            "messages": messages,
            "temperature": 0,
            "tools": TOOLS,
            "return_token_ids": True,
            **fields,
        }

    def turn(self, name: str, messages: list[Message], **fields: Any) -> tuple[Message, list[int]]:
        """A turn's message and its ids."""
        reply = self.client.post(CHAT, json=self.body(name, messages, **fields))
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        message = {key: choice["message"].get(key) for key in ("role", "content", "tool_calls")}
        return {key: value for key, value in message.items() if value is not None}, choice["token_ids"]

    def turn_that_dies(self, name: str, messages: list[Message], point: str, **fields: Any) -> None:
        self.armed.write_text(point)
        with pytest.raises(httpx.RemoteProtocolError):
            self.client.post(CHAT, json=self.body(name, messages, **fields))
        self.start_after_death()

    def session(self, name: str) -> Message:
        reply = self.client.get(f"/agentserve/sessions/{name}")
        assert reply.status_code == 200, reply.text
        found: Message = reply.json()
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def test_a_session_goes_on_bit_for_bit_after_every_kind_of_death(machine: Machine) -> None:
    m = machine
    ask = [user("What is the weather like in Oslo?")]
    later = user("And what should I wear?")
    length = {"max_tokens": 24, "ignore_eos": True}

    def result(call: Message) -> Message:
        return {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "4 degrees, rain"}

    # Undisturbed, in a session of its own: what everything after must equal.
    call, call_ids = m.turn("calm", ask, tool_choice=FORCED, max_tokens=60)
    history = [*ask, call, result(call)]
    answer, answer_ids = m.turn("calm", history, **length)
    calm_history = [*history, answer, later]
    last, last_ids = m.turn("calm", calm_history, **length)
    assert len(answer_ids) == len(last_ids) == 24
    calm = m.session("calm")

    # Before the commit: the turn is gone, its number and the wait are not.
    call, ids = m.turn("s", ask, tool_choice=FORCED, max_tokens=60)
    assert ids == call_ids
    waiting = m.session("s")
    history = [*ask, call, result(call)]
    m.turn_that_dies("s", history, "before", **length)
    assert m.session("calm") | {"pages": 0, "computed_tokens": 0} == calm | {"pages": 0, "computed_tokens": 0}
    session = m.session("s")
    assert (session["state"], session["turns"], session["epoch"]) == ("WAITING_TOOL", 1, 1)
    assert session["running_turn"] is None
    for name in ("tokens", "messages", "usage", "created_at"):
        assert session[name] == waiting[name], name
    [before], [after] = waiting["pending_tool_calls"], session["pending_tool_calls"]
    assert after == before | {"epoch": 1}
    assert (session["history"][-1]["turn"], session["history"][-1]["state"]) == (2, "WAITING_TOOL")
    reply, ids = m.turn("s", history, **length)
    assert (ids, reply) == (answer_ids, answer)
    session = m.session("s")
    assert (session["turns"], session["state"], session["history"][-1]["turn"]) == (2, "IDLE", 3)

    # While it streams: the client has tokens of a turn that never was.
    history = [*history, answer, later]
    got: list[int] = []
    with (
        suppress(httpx.RemoteProtocolError),
        m.client.stream("POST", CHAT, json=m.body("s", history, stream=True, **length)) as stream,
    ):
        for event in events(stream.iter_lines()):
            got += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
            if len(got) >= 3:
                m.process.kill()
    m.start_after_death()
    assert 3 <= len(got) < 24
    assert got == last_ids[: len(got)]
    session = m.session("s")
    assert (session["turns"], session["state"], session["epoch"]) == (2, "IDLE", 2)

    # After the commit, before the reply: the turn is there, whole, once.
    m.turn_that_dies("s", history, "after", **length)
    session = m.session("s")
    assert (session["turns"], session["epoch"], session["messages"]) == (3, 2, 6)
    assert session["usage"]["completion_tokens"] == calm["usage"]["completion_tokens"]
    assert session["tokens"] == calm["tokens"]
    assert session["history"][-1]["turn"] == 5  # 4 was cut off in its stream
    thanks = user("Thanks.")
    assert m.turn("s", [*history, last, thanks], **length) == m.turn(
        "calm", [*calm_history, last, thanks], **length
    )
    assert [m.session(name)["turns"] for name in ("s", "calm")] == [4, 4]
    listed = m.client.get("/agentserve/sessions").json()["data"]
    assert sorted(one["id"] for one in listed) == ["calm", "s"]
    health = m.client.get("/health").json()
    assert health["sessions_disk"] == {"state": "ok", "skipped": 0}
