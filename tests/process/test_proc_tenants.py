"""Two tenants and an admin on a real server with tiers on disk: what one computed is of no use to the other,
in any tier, before and after a restart; and no key is anywhere but with whom it was given to."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.server.tenants.keyfile import KeyFile
from tests.process.serving import serving

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0
FACTS = " ".join(f"Fact {number} is {number * number}." for number in range(12))
PROMPTS = [f"Agent {name}. {FACTS} Say something of agent {name}." for name in range(5)]
API_KEY = "canary-of-the-default-tenant"


def new_key(folder: Path, *whose: str) -> str:
    command = [sys.executable, "-m", "agentserve", "keys", "create", "--data-dir", str(folder), *whose]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def server(folder: Path, errors: Any) -> AbstractContextManager[tuple[httpx.Client, subprocess.Popen[str]]]:
    flags = ["--device-kv", "14MiB", "--host-kv", "4MiB", "--disk-kv", "64MiB", "--tier-policy", "lru"]
    flags += ["--data-dir", str(folder), "--api-key", API_KEY, "--log-level", "debug"]
    return serving(*flags, patience=LIMIT, stderr=errors)


def cached(client: httpx.Client, key: str, text: str, **fields: Any) -> int:
    """Prompt tokens that were not computed."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 3,
        "ignore_eos": True,
        **fields,
    }
    reply = client.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    if not found:
        assert usage["agentserve"]["computed_tokens"] >= usage["prompt_tokens"]
    return found


def hits(client: httpx.Client, admin: str) -> dict[str, float]:
    """Prompt tokens found, by tier, once nothing is being moved any more."""
    deadline = time.monotonic() + LIMIT
    while True:
        page = client.get("/metrics", headers={"x-api-key": admin})
        assert page.status_code == 200
        if re.search(r"^agentserve_tier_moving_blocks 0", page.text, re.MULTILINE):
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lines = re.findall(r'^agentserve_tier_hit_tokens_total\{tier="(\w+)"\} (\S+)', page.text, re.MULTILINE)
    return {tier: float(value) for tier, value in lines}


def test_tenants_share_a_machine_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    file = KeyFile(folder / "tenants")
    a, b = new_key(folder, "--tenant", "a"), file.create("b", time.time())[1]
    admin = file.create(None, time.time())[1]
    keys = (a, b, admin, API_KEY)
    with open(tmp_path / "errors", "w+") as errors:
        with server(folder, errors) as (client, _):
            assert client.get("/v1/models").status_code == 401
            for text in PROMPTS:
                cached(client, a, text, session_id=text[:7].replace(" ", "-"))
            before = hits(client, admin)
            for text in PROMPTS:
                assert cached(client, a, text) > 0
            found = hits(client, admin)
            assert found["host"] + found["disk"] > before["host"] + before["disk"], "from below the device"
            for key in (b, API_KEY):
                for salt in (None, "a", "1:a:"):
                    assert cached(client, key, PROMPTS[4], cache_salt=salt) == 0
            assert {tier: n for tier, n in hits(client, admin).items() if n > found[tier]} == {}
            for key in (a, b, API_KEY):
                assert client.get("/metrics", headers={"x-api-key": key}).status_code == 403
            late = file.create("late", time.time())[1]
            deadline = time.monotonic() + LIMIT
            while client.get("/v1/models", headers={"x-api-key": late}).status_code != 200:
                assert time.monotonic() < deadline, "a new key is not taken"
                time.sleep(0.05)
            boss = {"x-api-key": admin}
            made = client.post("/agentserve/admin/keys", json={"tenant": "late"}, headers=boss).json()
            assert client.get("/v1/models", headers={"x-api-key": made["key"]}).status_code == 200
            limits = {"limits": {"requests_per_minute": 500}}
            client.post("/agentserve/admin/tenants/late", json=limits, headers=boss).raise_for_status()
        with server(folder, errors) as (client, _):
            assert cached(client, late, PROMPTS[0]) == 0
            told_late = client.get("/v1/models", headers={"x-api-key": made["key"]})
            assert told_late.headers["x-ratelimit-limit-requests"] == "500"
            assert hits(client, admin)["disk"] == 0
            for text in PROMPTS:
                cached(client, a, text)
            assert hits(client, admin)["disk"] > 0, "A's blocks outlive the server, for A"
            assert client.get("/agentserve/sessions/Agent-0", headers={"x-api-key": a}).status_code == 200
            assert client.get("/agentserve/sessions/Agent-0", headers={"x-api-key": b}).status_code == 404
        errors.seek(0)
        told = errors.read()
    assert "api INFO" in told
    audit = [json.loads(line) for line in (folder / "audit" / "audit.jsonl").read_text().splitlines()]
    assert {line["tenant"] for line in audit if "tenant" in line} == {"a", "b", "default", "late"}
    kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for key in (*keys, late, made["key"]):
        secret = key.rpartition("_")[2]
        assert secret not in told
        assert secret.encode() not in kept
