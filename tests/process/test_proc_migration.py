"""Two real workers with the real model: the one has no room for what runs there, the other has. A turn goes
over in the middle of its reply, and its client reads what it would have read anyway, in every bit."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.core.record import decode_entries
from agentserve.sim.replay import named_parts, replay
from tests.process.serving import serving
from tests.process.test_proc_tiers import LIMIT, at_rest

pytestmark = [pytest.mark.process, pytest.mark.model]

WRITES = 150  # tokens of a second turn: two contexts and what they write do not fit into the pool
Numbers = list[tuple[str, float, tuple[float, ...]]]  # of each token: text, log-probability, the runners-up's


def history(name: int) -> list[dict[str, Any]]:
    facts = " ".join(f"Fact {number} is {number * name}." for number in range(5))
    return [{"role": "user", "content": f"Agent {name}. {facts} Say something."}]


def body(messages: list[dict[str, Any]], session: str, count: int) -> dict[str, Any]:
    return {
        "model": "smollm2-135m",
        "messages": messages,
        "session_id": session,
        "temperature": 0,
        "max_tokens": count,
        "ignore_eos": True,
    }


def first_turn(client: httpx.Client, name: int) -> list[dict[str, Any]]:
    """The history with its reply, and the next question."""
    reply = client.post("/v1/chat/completions", json=body(history(name), f"agent-{name}", 4))
    assert reply.status_code == 200, reply.text
    said = reply.json()["choices"][0]["message"]["content"]
    return [*history(name), {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def streamed(
    client: httpx.Client, messages: list[dict[str, Any]], session: str
) -> tuple[Numbers, dict[str, int]]:
    """What a client reads, piece by piece, and what its turn took."""
    asked = body(messages, session, WRITES) | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 4,
    }
    numbers: Numbers = []
    took: dict[str, int] = {}
    with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            took = (chunk.get("usage") or {}).get("agentserve", took)
            for choice in chunk["choices"]:
                for token in (choice.get("logprobs") or {}).get("content", ()):
                    top = tuple(each["logprob"] for each in token["top_logprobs"])
                    numbers.append((token["token"], token["logprob"], top))
    return numbers, took


def test_a_turn_goes_to_the_worker_that_has_room_without_a_gap(tmp_path: Path) -> None:
    flags = ["--workers", "2", "--device-kv", "7MiB", "--disk-kv", "64MiB", "--data-dir", str(tmp_path)]
    flags += ["--record", str(tmp_path / "log")]
    with serving(*flags, "--tier-policy", "lru", patience=LIMIT, stderr=subprocess.PIPE) as (client, _):
        prompts = {name: first_turn(client, name) for name in (1, 2)}  # one after the other: on one worker
        at_rest(client)
        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(lambda name: streamed(client, prompts[name], f"agent-{name}"), prompts))
            # New sessions come one to each worker: nothing disturbs them there.
            again = list(pool.map(lambda name: streamed(client, prompts[name], f"again-{name}"), prompts))
        alone = [numbers for numbers, took in again]
        assert not any(took["preemptions"] for _, took in again)
        assert [numbers for numbers, _ in told] == alone
        assert all(len(numbers) == WRITES for numbers in alone)
        assert sum(took["preemptions"] for _, took in told) >= 1
        assert sum(took["migrations"] for _, took in told) == 1
        found = at_rest(client)
        assert found["moved_blocks_total borrow"] > 0, "what was on the first one's disk was read there"
        assert found["pinned_pages"] == 0
        # Its session lives on where it went; the worker that it left has forgotten it.
        assert client.get("/agentserve/sessions/agent-2").json()["state"] == "IDLE"
    for worker in (0, 1):
        result = replay(decode_entries((tmp_path / f"log.{worker}").read_bytes()), named_parts)
        assert result.plans > 0
        assert result.differs_at is None, "what is decided depends on the log alone"
