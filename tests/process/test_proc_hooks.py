"""Webhook tools on real disks and a real network: the server is killed, receivers misbehave, and each call
has one result or a defined error."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents_machine import shown
from tests.agents_rig import SESSIONS, body
from tests.hooks_rig import ACTION, ENDPOINTS, webhook_tool
from tests.process.test_proc_webhooks import Receiver

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
PATIENCE = 60.0
POINTS = (
    *("accept.before", "accept.after", "attempt.before", "attempt.after"),
    *("end.before", "end.after", "acknowledge.after"),
)


class Server:
    def __init__(self, folder: Path, armed: str = "-") -> None:
        self.folder = folder
        self.start(armed)

    def start(self, armed: str = "-") -> None:
        command = [sys.executable, str(HERE / "hooks_server.py"), str(self.folder / "data")]
        paths = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [*command, str(self.folder / "prompts"), armed],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        assert self.process.stdout is not None
        self.client = httpx.Client(base_url=self.process.stdout.readline().strip(), timeout=PATIENCE)

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """As its operator does: what is delivered goes on in the next server."""
        self.client.close()
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE)

    def endpoint(self, port: int, path: str, **fields: Any) -> str:
        made = {"name": path, "url": f"http://127.0.0.1:{port}/{path}", "event_types": [ACTION], **fields}
        reply = self.client.post(ENDPOINTS, json=made)
        assert reply.status_code == 200, reply.text
        id_: str = reply.json()["id"]
        return id_

    def session(self, endpoint: str, **tool: Any) -> str:
        """Without a turn, so that its id is known whatever happens then."""
        reply = self.client.post(SESSIONS, json=body({"tools": [webhook_tool(endpoint, **tool)]}))
        assert reply.status_code == 200, reply.text
        id_: str = reply.json()["id"]
        return id_

    def ask(self, session: str) -> None:
        content = [{"role": "user", "content": "Weather?"}]
        events = [{"type": "agent.session.input.message", "input": content}]
        try:
            reply = self.client.post(f"{SESSIONS}/{session}/events", json={"events": events})
            assert reply.status_code == 202, reply.text
        except httpx.TransportError:
            pass  # it killed itself meanwhile

    def items(self, session: str) -> list[Any]:
        self.until(lambda: self.client.get(f"{SESSIONS}/{session}").json()["status"] == "idle")
        data: list[Any] = self.client.get(f"{SESSIONS}/{session}/items?order=asc").json()["data"]
        return data

    def output(self, session: str) -> Any:
        items = self.items(session)
        assert [item["type"] for item in items] == [
            "message", "function_call", "function_call_output", "message"
        ]  # fmt: skip
        return items[2]["error"] if items[2]["output"] is None else items[2]["output"]

    def prompts(self) -> list[str]:
        return (self.folder / "prompts").read_text().splitlines()

    @staticmethod
    def until(done: Any) -> None:
        ends = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < ends
            time.sleep(0.02)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str]]:
    server = Server(tmp_path_factory.mktemp("undisturbed"))
    session = server.session(server.endpoint(receiver.port, "good"))
    server.ask(session)
    items = shown(server.items(session))
    server.kill()
    return items, server.prompts()


@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_is_killed_at_a_point(
    receiver: Receiver, undisturbed: tuple[Any, list[str]], tmp_path: Path, point: str
) -> None:
    receiver.got()
    server = Server(tmp_path, point)
    session = server.session(server.endpoint(receiver.port, "good"))
    server.ask(session)
    server.process.wait(PATIENCE)
    server.start()
    items = server.items(session)
    assert (shown(items), list(dict.fromkeys(server.prompts()))) == undisturbed
    got = receiver.got()
    assert len({event for _, event, *_ in got}) == 1  # so its effect is one
    server.until(lambda: server.client.get("/health").json()["webhooks"]["owed"] == 0)
    server.kill()


def test_a_result_that_is_posted_to_the_next_server(
    receiver: Receiver, undisturbed: tuple[Any, list[str]], tmp_path: Path
) -> None:
    receiver.got()
    server = Server(tmp_path)
    session = server.session(server.endpoint(receiver.port, "later", payload="full"))
    server.ask(session)
    event = json.loads(receiver.lines.get(timeout=PATIENCE).split(maxsplit=3)[2])
    url = event["data"]["required_action"]["callback_url"]
    log = server.client.get(ENDPOINTS).json()["data"][0]["id"]
    path = f"{ENDPOINTS}/{log}/deliveries"
    server.until(lambda: server.client.get(path).json()["data"][0]["status"] == "delivered")
    for end in (server.kill, server.stop):
        end()
        server.start()
        assert server.client.get(f"{SESSIONS}/{session}").json()["status"] == "requires_action"
    forged = url[:-4] + "AAAA"
    assert server.client.post(forged, json={"output": "result: forged"}).status_code == 404
    assert server.client.post(url, json={"output": "good"}).status_code == 202
    assert server.client.post(url, json={"output": "good"}).status_code == 202
    server.kill()
    server.start()
    assert server.client.post(url, json={"output": "good"}).status_code == 202
    assert server.client.post(url, json={"output": "sun"}).status_code == 409
    assert (shown(server.items(session)), list(dict.fromkeys(server.prompts()))) == undisturbed
    assert {id_ for _, id_, *_ in receiver.got()} <= {event["id"]}  # the first kill may have come too soon
    server.kill()


RESULTS = {
    "good": {"good"},
    "slow": {"slow"},
    "flaky": {"flaky"},
    "cut": {"whole"},
    "dropped": {"whole"},
    "busy": {"busy"},
    "hangs": {"The tool's webhook did not take the call in time.", "The tool did not answer within 2 s."},
    "silent": {"The tool's webhook did not take the call in time.", "The tool did not answer within 2 s."},
    "redirect": {"The tool's webhook did not take the call in time.", "The tool did not answer within 2 s."},
    "down": {"The tool's webhook did not take the call in time.", "The tool did not answer within 2 s."},
    "huge": {"The tool's webhook answered with what is no result."},
    "garbage": {"The tool's webhook answered with what is no result."},
    "gone": {"The tool's webhook is disabled."},
    "later": {"posted"},
}
SHORT = ("hangs", "silent", "redirect", "down")


def test_whatever_receivers_do_and_a_kill_in_the_middle_of_it(receiver: Receiver, tmp_path: Path) -> None:
    receiver.got()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    server = Server(tmp_path)
    endpoints = {
        name: server.endpoint(port if name == "down" else receiver.port, name, payload="full")
        for name in RESULTS
    }
    sessions = {
        name: [server.session(endpoint, timeout=2 if name in SHORT else 30) for _ in range(2)]
        for name, endpoint in endpoints.items()
    }
    for first, _ in sessions.values():
        server.ask(first)
    for name in ("slow", "flaky", "busy"):  # while they are being delivered
        path = f"{ENDPOINTS}/{endpoints[name]}/rotate_secret"
        assert server.client.post(path, json={"keep_old_secret_active_for_24_hours": True}).status_code == 200
    server.kill()
    server.start()
    for _, second in sessions.values():
        server.ask(second)
    urls: dict[str, str] = {}  # of the calls whose receiver takes its time
    seen: dict[str, set[str]] = {}
    while len(urls) < 2:
        path, id_, content, _ = receiver.lines.get(timeout=PATIENCE).split(maxsplit=3)
        data = json.loads(content)["data"]
        seen.setdefault(data["id"], set()).add(id_)
        if path == "/later":
            urls[data["id"]] = data["required_action"]["callback_url"]
    for session in (*reversed(sessions["later"]), *sessions["later"]):  # in another order, and again
        assert server.client.post(urls[session], json={"output": "posted"}).status_code == 202
    for name, both in sessions.items():
        for session in both:
            assert server.output(session) in RESULTS[name], name
    for _, id_, content, _ in receiver.got():
        seen.setdefault(json.loads(content)["data"]["id"], set()).add(id_)
    assert all(len(ids) == 1 for ids in seen.values())  # a call is one event, however often it came
    server.until(lambda: server.client.get("/health").json()["webhooks"]["owed"] == 0)
    assert server.client.get(f"{ENDPOINTS}/{endpoints['gone']}").json()["disabled"]
    server.kill()
