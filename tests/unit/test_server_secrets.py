"""Keys are in no log, reply, metric or dump: a key that is looked for everywhere."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.config import HttpConfig, ServeConfig
from agentserve.server.http.app import _routes
from agentserve.server.http.context import ServerOptions
from agentserve.server.tenants.audit import AuditLog, Entry
from agentserve.server.tenants.keyfile import KeyFile
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.workers.spec import worker_spec
from tests.api_rig import CHAT, Rig, served, user
from tests.fakes import ScriptedEngine, say

CANARY = "canary-5d1f"
TURN = b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":5}'


async def test_a_key_shows_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = KeyFile(tmp_path / "tenants")
    _, made = file.create("acme", 1.0)
    _, admin = file.create(None, 1.0)
    given, wrong = f"{CANARY}-given", f"{CANARY}-wrong"
    ring = Keyring([given], [f"{CANARY}-admin"], file)
    audit = AuditLog(tmp_path / "audit")
    rig = Rig(ScriptedEngine(say("hello")), keyring=ring, audit=audit, api_keys=(given,))
    secrets = (CANARY, made.rpartition("_")[2], admin.rpartition("_")[2])
    seen: list[str] = []

    def look(reply: httpx.Response) -> None:
        seen.append(f"{reply.headers} {reply.text}")

    for route in _routes():
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        for method in (route.methods or set()) - {"HEAD"}:
            for key in (made, admin, given, wrong, f"{CANARY}-admin"):
                headers = {"authorization": f"Bearer {key}", "idempotency-key": "same"}
                for content in (b"{}", b"nonsense", TURN):
                    look(await rig.client.request(method, path, headers=headers, content=content))
    rig.engine.describe = broken  # type: ignore[method-assign]
    failed = await rig.client.get("/metrics", headers={"x-api-key": admin})
    assert failed.status_code == 500
    look(failed)
    async with served(rig.app) as url, httpx.AsyncClient(base_url=url) as real:
        for key in (made, wrong):
            body = {"model": "tiny", "messages": [user("a")]}
            look(await real.post(CHAT, json=body, headers={"x-api-key": key}))
    audit.close()
    file.revoke(lambda record: True, 2.0)
    ring.look()
    kept = texts(tmp_path)
    things = (rig.context, rig.context.options, ring, vars(ring), rig.app, file.records())
    dumps = [repr(thing) for thing in things]
    assert len(seen) > 500
    assert any("GET" in text for text in kept)
    for text in (*seen, *kept, *dumps, caplog.text):
        for secret in secrets:
            assert secret not in text


def texts(folder: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]


async def broken(*arguments: Any) -> Any:
    raise RuntimeError("the engine is broken")


async def test_a_token_in_a_path_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """A callback's URL is all that its receiver needs: it is a key, wherever it breaks."""
    caplog.set_level(logging.DEBUG)
    told: list[Entry] = []
    rig = Rig(api_keys=("one",), audit=told.append)
    rig.context.hooks.__class__ = type("Broken", (), {})
    path = f"/v1/tool_callbacks/{CANARY}"
    assert (await rig.client.post(path, content=b"{}")).status_code == 500
    assert (await rig.client.get(path)).status_code in (404, 405)
    assert (await rig.client.get(f"/v1/models?after={CANARY}", headers={"x-api-key": "one"})).is_success
    logged = [record for record in caplog.records if not record.name.startswith("http")]
    assert any("/v1/tool_callbacks/{token} failed" in record.getMessage() for record in logged)
    formatter = logging.Formatter()
    assert CANARY not in "".join(map(formatter.format, logged))
    assert CANARY not in repr(told)


def test_keys_are_in_no_dump_of_settings() -> None:
    config = ServeConfig(http=HttpConfig(api_keys=(CANARY,), admin_keys=(CANARY,)))
    spec = worker_spec(config, 0, "/s", 1, 2)
    options = ServerOptions(model="m", api_keys=(CANARY,), admin_keys=(CANARY,))
    for dumped in (repr(options), repr(spec), repr(config)):
        assert CANARY not in dumped
