"""A webhook's call waits while its server is killed and stopped, with KV on disk and without: whenever its
result comes, and whichever way, the real model says what it says undisturbed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents_machine import shown
from tests.agents_rig import SESSIONS
from tests.hooks_rig import ACTION, ENDPOINTS, webhook_tool
from tests.process.hooks_life import free_port
from tests.process.test_proc_launch import until
from tests.process.test_proc_tiers import at_rest
from tests.process.test_proc_webhooks import PATIENCE, Receiver
from tests.process.tier_life import FACTS, Life

pytestmark = [pytest.mark.process, pytest.mark.model]

OUTPUT = {"output": "Sunny, 24 degrees."}


class Server:
    """One after the other on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.start("64MiB")

    def start(self, disk: str) -> None:
        url = f"http://127.0.0.1:{self.port}"
        where = {"port": str(self.port), "callback_url": url, "allow_private_callbacks": "true"}
        self.life = Life(self.folder, disk_kv=disk, **where)
        self.client = self.life.client

    def end(self, how: str) -> None:
        at_rest(self.client)
        getattr(self.life, how)()
        self.life.close()

    def endpoint(self, receiver: Receiver, path: str) -> str:
        url = f"http://127.0.0.1:{receiver.port}/{path}"
        made = {"name": path, "url": url, "event_types": [ACTION], "payload": "full"}
        reply = self.client.post(ENDPOINTS, json=made).json()
        receiver.knows(path, reply["signing_secret"])
        return str(reply["id"])

    def ask(self, endpoint: str) -> str:
        agent = {
            "model": "smollm2-135m",
            "instructions": FACTS,
            "tools": [webhook_tool(endpoint)],
            "temperature": 0,
            "max_output_tokens": 40,
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        }
        body = {"environment": {"type": "none"}, "agent": agent, "input": "What is the weather in Rome?"}
        reply = self.client.post(SESSIONS, json=body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    def waits(self, session: str) -> None:
        until(lambda: self.status(session) == "requires_action")

    def status(self, session: str) -> str:
        return str(self.client.get(f"{SESSIONS}/{session}").json()["status"])

    def said(self, session: str) -> Any:
        """Its items, and what they took."""
        until(lambda: self.status(session) == "idle")
        items = self.client.get(f"{SESSIONS}/{session}/items?order=asc").json()["data"]
        usage = self.client.get(f"{SESSIONS}/{session}").json()["usage"]
        return shown(items), usage["input_tokens"], usage["output_tokens"]

    def hits(self) -> float:
        return at_rest(self.client).get("hit_tokens_total disk", 0.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.life.close()


def callback_of(receiver: Receiver) -> str:
    data = json.loads(receiver.lines.get(timeout=PATIENCE).split(maxsplit=3)[2])["data"]
    return str(data["required_action"]["callback_url"])


def test_a_session_finishes_bit_exactly(server: Server) -> None:
    receiver, still = Receiver(), Receiver()
    later, replies = server.endpoint(receiver, "later"), server.endpoint(still, "sunny")
    calm = server.ask(later)
    assert httpx.post(callback_of(receiver), json=OUTPUT).status_code == 202
    undisturbed = server.said(calm)
    assert [item["type"] for item in undisturbed[0]] == [
        "message", "function_call", "function_call_output", "message"
    ]  # fmt: skip
    waiting = []
    for _ in range(4):
        waiting.append((server.ask(later), callback_of(receiver)))
        server.waits(waiting[-1][0])
    still.fork.signal(signal.SIGSTOP)
    replied = [server.ask(replies) for _ in range(2)]
    for session in replied:
        server.waits(session)
    for (session, url), (how, disk) in zip(
        waiting, [("kill", "64MiB"), ("kill", "0"), ("stop", "64MiB"), ("stop", "0")], strict=True
    ):
        server.end(how)
        server.start(disk)
        server.waits(session)
        assert httpx.post(url, json=OUTPUT).status_code == 202
        assert server.said(session) == undisturbed, (how, disk)
        assert (server.hits() > 0) == (disk != "0"), (how, disk)
        if how == "kill" and disk == "0":
            still.fork.signal(signal.SIGCONT)  # it is heard by this server and by those that come
    for session in replied:
        assert server.said(session) == undisturbed
    assert set(still.effects().values()) == {1}
    assert len(still.effects()) == len(replied)
    for one in (receiver, still):
        one.close()
