"""/agentserve/admin/tenants: who there is, and what each may ask for."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import json_response
from agentserve.server.http.admin.keys import done_with_file, tenant_in
from agentserve.server.http.admin.schemas import LimitsRequest, TenantReply
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.schemas import decode
from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.server.tenants.keys import KeyRecord
from agentserve.server.text_port import JsonObject


async def list_tenants(request: Request) -> Response:
    """Those that have keys, limits of their own, or have asked for something since the start."""
    context = context_of(request)
    keys = await _keys(context)
    named = {record.tenant for record in keys if record.tenant is not None}
    everybody = {DEFAULT_TENANT} | named | context.terms.named() | set(context.accounts.tallies)
    return json_response(
        {"object": "list", "data": [_shown(context, tenant, keys) for tenant in sorted(everybody)]}
    )


async def get_tenant(request: Request) -> Response:
    context, tenant = context_of(request), tenant_in(request)
    return json_response(_shown(context, tenant, await _keys(context)))


async def set_limits(request: Request) -> Response:
    """Limits that are named change, at once; the others stay."""
    context, tenant = context_of(request), tenant_in(request)
    limits = context.options.limits
    body = decode(await read_body(request, limits.body_bytes), LimitsRequest, limits)
    # One at a time, and here: who reads limits does so on the event loop.
    async with context.terms_lock:
        await asyncio.to_thread(done_with_file, lambda: context.terms.say(tenant, body.limits))
    return json_response(_shown(context, tenant, await _keys(context)))


async def _keys(context: ServerContext) -> list[KeyRecord]:
    file = context.keyring.file
    return [] if file is None else await asyncio.to_thread(done_with_file, file.records)


def _shown(context: ServerContext, tenant: str, keys: list[KeyRecord]) -> JsonObject:
    now = context.wall()
    shown = TenantReply(
        object="tenant",
        id=tenant,
        keys=sum(record.tenant == tenant and record.holds(now) for record in keys),
        sessions=context.directory.count(tenant),
        limits=msgspec.to_builtins(context.terms.of(tenant)),
        set=context.terms.said(tenant),
    )
    told: JsonObject = msgspec.to_builtins(shown)
    return told
