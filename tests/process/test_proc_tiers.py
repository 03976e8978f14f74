"""`agentserve serve` with tiers and the real model: the same tokens from all, through kills and restarts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.core.record import decode_entries
from agentserve.sim.replay import named_parts, replay
from tests.process.serving import serving

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0
AGENTS = 5
FACTS = " ".join(f"Fact {number} is {number * number}." for number in range(12))


def server(*flags: str) -> AbstractContextManager[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A server whose device pool holds two agents of five, and a client of it."""
    return serving("--device-kv", "14MiB", *flags, patience=LIMIT, stderr=subprocess.PIPE)


def rounds(client: httpx.Client, count: int) -> list[str]:
    """What five agents are told in `count` turns each, two at a time."""
    histories: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"Agent {name}. {FACTS} Say something of agent {name}."}]
        for name in range(AGENTS)
    ]
    said = []

    def turn(history: list[dict[str, Any]]) -> dict[str, Any]:
        body = {
            "model": "smollm2-135m",
            "messages": history,
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
        }
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"]}

    with ThreadPoolExecutor(2) as pool:
        for _ in range(count):
            for history, message in zip(histories, pool.map(turn, histories), strict=True):
                said.append(message["content"])
                history += [message, {"role": "user", "content": "Go on."}]
    return said


def totals(client: httpx.Client) -> dict[str, float]:
    """Samples of /metrics about tiers; those with one label by its value: `hit_tokens_total host`."""
    found = {}
    for line in client.get("/metrics").text.splitlines():
        match = re.fullmatch(r'agentserve_tier_(\w+)(?:\{\w+="([^"]+)"\})? (\S+)', line)
        if match is not None and not match[1].endswith("_created"):
            found[" ".join(filter(None, match.groups()[:2]))] = float(match[3])
    return found


def at_rest(client: httpx.Client) -> dict[str, float]:
    """The same, once nothing is being moved any more."""
    deadline = time.monotonic() + LIMIT
    while (found := totals(client))["moving_blocks"]:
        assert time.monotonic() < deadline, "a transfer does not end"
        time.sleep(0.02)
    return found


def events_until(client: httpx.Client, path: str, choice: str) -> dict[str, list[dict[str, Any]]]:
    """A session's events by kind, up to its first decision for `choice`."""
    found: dict[str, list[dict[str, Any]]] = {"decision": [], "devalued": []}
    kind = ""
    with client.stream("GET", path) as reply:
        for line in reply.iter_lines():
            name, _, value = line.partition(": ")
            kind = value if name == "event" else kind
            if name == "data" and kind in found:
                found[kind].append(json.loads(value))
                if found["decision"] and found["decision"][-1]["choice"] == choice:
                    break
    return found


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """What is said without tiers."""
    with server() as (client, _):
        assert client.get("/health").json()["tiers"] == {"device": {"state": "ok"}}
        return rounds(client, 2)


def test_every_tier_gives_the_same_tokens_through_kills_and_restarts(
    plain: list[str], tmp_path: Path
) -> None:
    flags = ["--host-kv", "4MiB", "--disk-kv", "64MiB", "--data-dir", str(tmp_path), "--tier-policy", "lru"]
    with server(*flags) as (client, process):
        assert rounds(client, 2) == plain
        before = at_rest(client)
        assert before["moved_blocks_total write"] > 0
        assert before["failed_blocks_total fetch"] == before["failed_blocks_total save"] == 0
        tiers = client.get("/health").json()["tiers"]
        assert (tiers["host"]["state"], tiers["disk"]["state"], tiers["policy"]) == ("ok", "ok", "lru")
        worker = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(worker, signal.SIGKILL)
        assert rounds(client, 2) == plain, "from what the dead worker had on disk"
        after = at_rest(client)
        assert after["hit_tokens_total disk"] > before["hit_tokens_total disk"]
        assert all(after[name] >= total for name, total in before.items() if "_total" in name)
        assert after["pinned_pages"] == 0
    log = tmp_path / "log"
    with server(*flags, "--record", str(log)) as (client, _):
        assert rounds(client, 2) == plain
        assert totals(client)["hit_tokens_total disk"] > 0, "KV outlives the server"
    result = replay(decode_entries(log.read_bytes()), named_parts)
    assert result.differs_at is None, "what is decided depends on the log alone"
    assert result.plans > 0


def test_host_memory_alone(plain: list[str]) -> None:
    with server("--host-kv", "48MiB") as (client, _):
        assert rounds(client, 2) == plain
        found = totals(client)
        assert found["hit_tokens_total host"] > 0
        assert found["capacity_blocks disk"] == 0
        shown = client.get("/agentserve/sessions?detail=true").json()["data"]
        path = f"/agentserve/sessions/{shown[0]['id']}"
        told = {"final": True, "retain": [{"start": 0, "end": 16, "priority": 100}]}
        receipts = client.post(f"{path}/hints", json=told).json()["receipts"]
        assert [receipt["status"] for receipt in receipts.values()] == ["accepted", "accepted"]
        seen = events_until(client, f"{path}/events", "drop")
        assert any(made["choice"] == "host" for made in seen["decision"])
        assert seen["devalued"][-1]["why"] == "finished"
        assert client.get(path).json()["decision"]["choice"] == "drop"
        said = client.post(f"{path}/hints", json={"final": False}).json()["receipts"]["final"]
        assert said == {"status": "accepted", "value": False, "reason": ""}
        assert client.get(path).json()["decision"]["choice"] != "drop"
        assert any(session["residency"]["host"] for session in shown)
        assert all(session["decision"]["reason"] for session in shown)


def test_two_workers_with_a_disk_each_read_what_the_other_has(plain: list[str], tmp_path: Path) -> None:
    """No host tier: blocks pass through the staging area. Turns of a worker that died go to the other one."""
    flags = ["--workers", "2", "--disk-kv", "128MiB", "--data-dir", str(tmp_path), "--tier-policy", "lru"]
    with server(*flags) as (client, process):
        assert rounds(client, 2) == plain
        before = at_rest(client)
        assert before["moved_blocks_total write"] > 0
        assert before["capacity_blocks host"] == 0
        assert "host" not in client.get("/health").json()["tiers"]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [pid for pid in children if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(workers[0]), signal.SIGKILL)
        assert rounds(client, 2) == plain
        after = at_rest(client)
        assert after["moved_blocks_total borrow"] > 0
        assert after["pinned_pages"] == 0
