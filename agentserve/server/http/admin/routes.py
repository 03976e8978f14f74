"""Where admins are served."""

from __future__ import annotations

from starlette.routing import Route

from agentserve.server.http.admin import keys, tenants

ADMIN = "/agentserve/admin"
_KEY = f"{ADMIN}/keys/{{id}}"
_TENANT = f"{ADMIN}/tenants/{{tenant}}"


def routes() -> list[Route]:
    return [
        Route(f"{ADMIN}/keys", keys.list_keys, methods=["GET"]),
        Route(f"{ADMIN}/keys", keys.create_key, methods=["POST"]),
        Route(_KEY, keys.revoke_key, methods=["DELETE"]),
        Route(f"{_KEY}/rotate", keys.rotate_key, methods=["POST"]),
        Route(f"{ADMIN}/tenants", tenants.list_tenants, methods=["GET"]),
        Route(_TENANT, tenants.get_tenant, methods=["GET"]),
        Route(_TENANT, tenants.set_limits, methods=["POST"]),
        Route(f"{_TENANT}/keys", keys.revoke_keys_of, methods=["DELETE"]),
    ]
