"""A server with two tenants and an admin, and a client of each."""

from __future__ import annotations

from typing import Any

import httpx

from agentserve.server.tenants.keys import Caller
from tests.api_rig import Rig

A, B, ADMIN, WRONG = "key-of-a", "key-of-b", "key-of-an-admin", "key-of-nobody"
CALLERS = {
    A: Caller("a", key="id-a"),
    B: Caller("b", key="id-b"),
    ADMIN: Caller(None, admin=True, key="id-admin"),
}


class MadeUpKeys:
    """As a keyring is asked."""

    closed = True
    shared = True

    def caller(self, key: str) -> Caller | None:
        return CALLERS.get(key)

    def holds(self, id_: str) -> bool:
        return True

    def look(self) -> None:
        pass


def with_key(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


class Tenants(Rig):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, keyring=MadeUpKeys(), **options)
        self.a, self.b, self.admin, self.nobody = (self._client(key) for key in (A, B, ADMIN, None))

    def _client(self, key: str | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://localhost",
            headers=with_key(key),
        )
