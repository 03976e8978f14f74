"""Stored responses and conversations outlive `kill -9` of the server, with the real model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.serving import url_of
from tests.process.test_proc_launch import gone, until

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0
RESPONSES = "/v1/responses"


class Machine:
    def __init__(self, data: Path) -> None:
        self._data = data
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "agentserve", "serve", "--port", "0", "--device-kv", "64MiB"]
        command += ["--threads", "1", "--log-level", "warning", "--data-dir", str(self._data)]
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

    def create(self, given: str, **fields: Any) -> Any:
        body = {"model": "smollm2-135m", "input": given, "temperature": 0, "max_output_tokens": 12, **fields}
        reply = self.client.post(RESPONSES, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def get(self, path: str) -> Any:
        reply = self.client.get(path)
        return reply.json() if reply.status_code == 200 else reply.status_code


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "data")
    yield made
    made.close()


def test_what_was_stored_is_there_after_a_kill(machine: Machine) -> None:
    m = machine
    first = m.create("Name a colour.", instructions="You are brief.")
    second = m.create("Another one.", instructions="You are brief.", previous_response_id=first["id"])
    dropped = m.create("Forget this.")
    assert m.client.delete(f"{RESPONSES}/{dropped['id']}").status_code == 200
    conversation = m.client.post("/v1/conversations", json={"metadata": {"a": "b"}}).json()
    spoken = m.create("Hello.", conversation=conversation["id"])
    items = m.get(f"/v1/conversations/{conversation['id']}/items?order=asc")
    endless = m.create("Count.", background=True, max_output_tokens=4000)
    assert endless["status"] == "queued"
    m.kill()  # no farewell
    m.start()
    for made in (first, second, spoken):
        assert m.get(f"{RESPONSES}/{made['id']}") == made
    assert m.get(f"{RESPONSES}/{dropped['id']}") == 404
    broken = m.get(f"{RESPONSES}/{endless['id']}")
    assert (broken["status"], broken["error"]["code"]) == ("failed", "server_error")
    assert m.get(f"/v1/conversations/{conversation['id']}") == conversation
    assert m.get(f"/v1/conversations/{conversation['id']}/items?order=asc") == items
    assert m.get("/health")["responses_disk"] == {"state": "ok", "skipped": 0}

    third = m.create("And one more.", instructions="You are brief.", previous_response_id=second["id"])
    assert third["session_id"] == first["session_id"]
    kept = m.get(f"{RESPONSES}/{third['id']}/input_items?order=asc")["data"]
    assert [item["role"] for item in kept] == ["user", "assistant", "user", "assistant", "user"]
    last = m.create("Bye.", conversation=conversation["id"])
    assert last["session_id"] == spoken["session_id"]
