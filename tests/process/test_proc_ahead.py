"""Prefill ahead with the real server and model: a tool's output is computed while it arrives."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.core.record import decode_entries
from agentserve.sim.replay import named_parts, replay
from tests.api_rig import CHAT, TOOLS, user
from tests.process.serving import serving

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 120.0
FORCED = {"type": "function", "function": {"name": "weather"}}
PIECES = [
    "".join(
        f"Station {piece}-{line}: rain, {line + piece} degrees, wind from the west.\n" for line in range(12)
    )
    for piece in range(3)
]
END = 24  # tokens at most: what stands behind a result in the prompt, and what of its own end is uncertain


@contextmanager
def server(*flags: str) -> Iterator[httpx.Client]:
    flags = ("--device-kv", "64MiB", "--max-batched-tokens", "256", *flags)
    with serving(*flags, patience=LIMIT) as (client, _):
        yield client


@dataclass(frozen=True)
class Waiting:
    path: str
    call: str
    context: int  # tokens


def asked(client: httpx.Client, salt: str) -> Waiting:
    """A session that waits for one tool's result, and shares KV with those of its salt."""
    body = {
        "model": "smollm2-135m",
        "messages": [user("What is the weather in Oslo?")],
        "tools": TOOLS,
        "tool_choice": FORCED,
        "temperature": 0,
        "max_tokens": 60,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    reply = client.post(CHAT, json=body).json()
    choice = reply["choices"][0]
    [call] = choice["message"]["tool_calls"]
    context = len(reply["prompt_token_ids"]) + len(choice["token_ids"])
    return Waiting(f"/agentserve/sessions/{reply['session_id']}", call["id"], context)


def ahead(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    return {
        what: float(count)
        for what, count in re.findall(r'^agentserve_ahead_tokens_total\{what="(\w+)"\} (\S+)$', text, re.M)
    }


def until(client: httpx.Client, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < deadline, f"never computed: {ahead(client)}"
        time.sleep(0.01)


def computed(reply: dict[str, Any]) -> int:
    usage = reply["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def check(client: httpx.Client) -> dict[str, Any]:
    """Uploads in pieces with pauses: the turn has little left to compute, and says the same. Returns what."""
    other = asked(client, "cold")
    result = {"call_id": other.call, "content": "".join(PIECES), "max_tokens": 8}
    plain = client.post(f"{other.path}/tool_results", json=result).json()
    added = plain["usage"]["prompt_tokens"] - other.context
    assert added > 2 * 256, "several steps of work"
    assert ahead(client) == {"computed": 0, "used": 0}

    session = asked(client, "ours")
    assert session.context == other.context

    def pieces() -> Iterator[bytes]:
        for number, piece in enumerate(PIECES, 1):
            yield piece.encode()
            certain = added * number / len(PIECES) - 2 * END
            until(client, lambda certain=certain: ahead(client)["computed"] >= certain)

    url = f"{session.path}/tool_results/{session.call}/stream?max_tokens=8"
    with httpx.Client(base_url=client.base_url, timeout=LIMIT) as uploader:
        streamed = uploader.post(url, content=pieces()).json()
    assert streamed["choices"][0]["message"] == plain["choices"][0]["message"]
    assert streamed["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert streamed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert 0 < computed(streamed) <= 2 * END
    counts = ahead(client)
    assert counts["used"] >= added - 2 * END
    assert counts["computed"] - counts["used"] <= 64, "hardly anything twice, or for nothing"
    assert "agentserve_kv_pages_live 0.0" in client.get("/metrics").text
    return plain


def check_broken_off(client: httpx.Client, plain: dict[str, Any]) -> None:
    """What was computed for an upload that broke off is of no use, and does no harm."""
    before = ahead(client)
    third = asked(client, "ours")
    url = f"{third.path}/tool_results/{third.call}/stream"

    def breaks_off() -> Iterator[bytes]:
        yield b"Snow! " * 200
        until(client, lambda: ahead(client)["computed"] >= before["computed"] + 100)
        raise ConnectionAbortedError

    with (
        suppress(ConnectionAbortedError),
        httpx.Client(base_url=client.base_url, timeout=LIMIT) as uploader,
    ):
        uploader.post(url, content=breaks_off())
    again = client.post(
        f"{third.path}/tool_results",
        json={"call_id": third.call, "content": "".join(PIECES), "max_tokens": 8},
    ).json()
    assert again["choices"][0]["message"] == plain["choices"][0]["message"]
    assert ahead(client)["used"] - before["used"] <= END, "it was another text"


def test_a_turn_begins_with_what_was_computed_while_its_result_arrived() -> None:
    with server() as client:
        check_broken_off(client, check(client))


def test_with_tiers_and_a_log_that_replays(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server("--host-kv", "16MiB", "--record", str(log)) as client:
        check(client)
    result = replay(decode_entries(log.read_bytes()), named_parts)
    assert result.differs_at is None
    assert result.plans > 0
