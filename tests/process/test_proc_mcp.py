"""`kill -9` of the server in the middle of calls of MCP servers that responses make: each has one effect, and
what is there afterwards is defined."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.server.http.responses.rounds import ONCE
from tests.mcp_rig import needs_mcp, real_server
from tests.process.serving import url_of
from tests.responses_mcp_rig import approval, of_kind

pytestmark = [pytest.mark.process, needs_mcp]

LIMIT = 120.0
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"


@contextmanager
def life(data: Path) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "tests.process.mcp_life", str(data)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=url_of(process), timeout=LIMIT) as client:
            yield client, process
    finally:
        process.kill()
        process.communicate()


def tool(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "calc", "server_url": url, "require_approval": "never", **fields}


def approved(name: str) -> list[dict[str, Any]]:
    """A call of `slow` that was asked for before, and is approved now."""
    id_ = f"mcpr_{ord(name):024x}{ord(name):022x}00"
    named = {"server_label": "calc", "name": "slow", "arguments": f'{{"name": "{name}"}}'}
    request = {"type": "mcp_approval_request", "id": id_, **named}
    return [{"role": "user", "content": "Go."}, request, approval(request)]


class Calls:
    """What the MCP server knows of calls, asked through a server that runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    def began(self, client: httpx.Client) -> Counter[str]:
        body = {"model": "tiny", "input": "call tell {}", "tools": [tool(self._url)], "store": False}
        reply = client.post(RESPONSES, json=body)
        assert reply.status_code == 200, reply.text
        said: str = of_kind(reply.json(), "mcp_call")["output"]
        return Counter(word for word in "abc" for _ in range(said.count(f"{word} began")))

    def until(self, client: httpx.Client, wanted: Counter[str]) -> None:
        ends = time.monotonic() + LIMIT
        while self.began(client) != wanted:
            assert time.monotonic() < ends
            time.sleep(0.02)


def test_a_server_that_is_killed_in_mid_call(tmp_path: Path) -> None:
    with real_server() as url:
        calls, tools = Calls(url), [tool(url)]
        body: dict[str, Any] = {"model": "tiny", "tools": tools}
        with life(tmp_path) as (client, process):
            conversation = client.post(CONVERSATIONS, json={}).json()["id"]
            first = client.post(RESPONSES, json={**body, "input": "Hi"}).json()
            foreground = body | {"input": approved("a"), "conversation": conversation}
            broken: list[httpx.HTTPError] = []

            def post() -> None:
                try:
                    client.post(RESPONSES, json=foreground)
                except httpx.HTTPError as error:
                    broken.append(error)

            waits = threading.Thread(target=post)
            waits.start()
            more = {"background": True, "previous_response_id": first["id"]}
            behind = client.post(RESPONSES, json={**body, "input": 'call slow {"name": "b"}', **more}).json()
            also = client.post(RESPONSES, json={**body, "input": approved("c"), **more}).json()
            once = Counter("abc")
            calls.until(client, once)
            process.kill()
            waits.join(LIMIT)
            assert broken
        with life(tmp_path) as (client, _):
            for made in (behind, also):
                found = client.get(f"{RESPONSES}/{made['id']}").json()
                assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
                assert found["output"] == []
            assert client.get(f"{CONVERSATIONS}/{conversation}/items").json()["data"] == []
            assert calls.began(client) == once  # a start makes no call
            for given in (foreground, {**body, "input": approved("c"), "previous_response_id": first["id"]}):
                again = client.post(RESPONSES, json=given).json()
                assert again["status"] == "completed"
                call = of_kind(again, "mcp_call")
                assert (call["status"], call["error"]["content"][0]["text"]) == ("failed", ONCE)
            assert calls.began(client) == once
            for more in ({"conversation": conversation}, {"previous_response_id": behind["id"]}):
                told = client.post(RESPONSES, json={**body, "input": "Well?", **more}).json()
                assert (told["status"], told["output"][-1]["content"][0]["text"]) == ("completed", "Done.")
            assert calls.began(client) == once
