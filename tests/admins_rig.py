"""A server with real keys in a data directory, and its admin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from agentserve.server.tenants.keyfile import KeyFile
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.terms import Terms
from agentserve.tenant_limits import TenantLimits, TenantsConfig
from tests.api_rig import Rig, user
from tests.fakes import ScriptedEngine, say
from tests.tenants_rig import with_key

KEYS, TENANTS = "/agentserve/admin/keys", "/agentserve/admin/tenants"
TURN = {"model": "tiny", "messages": [user("hi")], "max_tokens": 50}
CONFIG = TenantsConfig(TenantLimits(requests_per_minute=1000), {"loud": TenantLimits(sessions=7)})


class Admins(Rig):
    def __init__(self, folder: Path, engine: ScriptedEngine | None = None, **more: Any) -> None:
        self.file = KeyFile(folder / "tenants")
        self.time = 1000.0
        _, self.boss = self.file.create(None, 1.0)
        super().__init__(
            engine or ScriptedEngine(say("hello")),
            keyring=Keyring(file=self.file, wall=lambda: self.time),
            terms=Terms(CONFIG, self.file.folder),
            wall=lambda: self.time,
            tenants=CONFIG,
            **more,
        )

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        content = None if body is None else json.dumps(body).encode()
        return await self.client.request(method, path, content=content, headers=with_key(key or self.boss))

    async def made(self, tenant: str) -> dict[str, Any]:
        reply = await self.ask("POST", KEYS, {"tenant": tenant})
        assert reply.status_code == 200, reply.text
        assert reply.headers["cache-control"] == "no-store"
        told: dict[str, Any] = reply.json()
        return told

    async def models(self, key: str) -> int:
        return (await self.client.get("/v1/models", headers=with_key(key))).status_code
