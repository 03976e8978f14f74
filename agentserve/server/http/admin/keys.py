"""/agentserve/admin/keys: who is let in, with an admin's key. `agentserve keys` does the same beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError, json_response
from agentserve.server.http import query
from agentserve.server.http.admin.schemas import KeyReply, KeyRequest, RotateKeyRequest
from agentserve.server.http.callers import about
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.schemas import decode
from agentserve.server.tenants.keyfile import MOST_GRACE, KeyFile, KeysError
from agentserve.server.tenants.keys import KeyRecord
from agentserve.server.text_port import JsonObject
from agentserve.tenant_names import is_tenant

NOT_KEPT = {"cache-control": "no-store"}
Result = TypeVar("Result")


async def list_keys(request: Request) -> Response:
    """All keys, the oldest first; with `tenant` that one's."""
    context, tenant = context_of(request), query.text(request, "tenant")
    records = await _of_file(context, KeyFile.records)
    now = context.wall()
    shown = [shown_key(one, now) for one in records if tenant is None or one.tenant == tenant]
    return json_response({"object": "list", "data": shown})


async def create_key(request: Request) -> Response:
    """The reply has the key, this once. It is let in at once."""
    context = context_of(request)
    body = await _body(request, KeyRequest)
    if body.admin == (body.tenant is not None):
        raise ApiError("tenant: say a tenant's name, or `admin` true", param="tenant", code="invalid_value")
    if body.tenant is not None and not context.keyring.shared:
        raise ApiError(
            "The first key to be made is an admin's (`admin` true): the keys that the server was started "
            "with open admin routes only until there is another, and then nobody could make one.",
            status=409,
            param="tenant",
            code="admin_key_first",
        )
    now = context.wall()
    if body.tenant is not None and is_tenant(body.tenant):
        about(request, body.tenant)  # until there is a key
    record, key = await _of_file(context, lambda file: file.create(body.tenant, now))
    about(request, record.id)
    return _made(context, record, key)


async def revoke_key(request: Request) -> Response:
    """It is let in no longer, and what runs for it ends."""
    context, id_, now = context_of(request), request.path_params["id"], context_of(request).wall()
    gone = await _of_file(context, lambda file: file.revoke(lambda one: one.id == id_, now))
    if not gone:
        raise _no_such_key()
    context.look_at_keys()
    return json_response(shown_key(gone[0], now))


async def rotate_key(request: Request) -> Response:
    """A new key of the same tenant, shown this once; the old one is let in for `grace_seconds` yet."""
    context, id_, now = context_of(request), request.path_params["id"], context_of(request).wall()
    grace = (await _body(request, RotateKeyRequest)).grace_seconds
    if not 0 <= grace <= MOST_GRACE:
        raise ApiError(f"grace_seconds: must be 0 to {MOST_GRACE:g}", param="grace_seconds")
    made = await _of_file(context, lambda file: file.rotate(id_, now, grace))
    if made is None:
        raise _no_such_key()
    return _made(context, *made)


async def revoke_keys_of(request: Request) -> Response:
    """All keys of a tenant at once. What it has stays."""
    context, tenant = context_of(request), tenant_in(request)
    now = context.wall()
    gone = await _of_file(context, lambda file: file.revoke(lambda one: one.tenant == tenant, now))
    context.look_at_keys()
    shown = [shown_key(one, now) for one in gone]
    return json_response({"object": "list", "data": shown})


def tenant_in(request: Request) -> str:
    """The tenant that an admin's path names. ApiError."""
    tenant: str = request.path_params["tenant"]
    if not is_tenant(tenant):
        raise ApiError("No tenant can be called so.", status=404, code="tenant_not_found")
    return tenant


def shown_key(record: KeyRecord, now: float) -> JsonObject:
    ends = record.revoked
    shown = KeyReply(
        object="key",
        id=record.id,
        tenant=record.tenant,
        admin=record.tenant is None,
        created=round(record.created, 3),
        status="active" if ends is None else "expiring" if record.holds(now) else "revoked",
        revoked_at=None if ends is None else round(ends, 3),
    )
    told: JsonObject = msgspec.to_builtins(shown)
    del told["key"]
    return told


def _made(context: ServerContext, record: KeyRecord, key: str) -> Response:
    context.look_at_keys()
    return json_response(shown_key(record, context.wall()) | {"key": key}, headers=NOT_KEPT)


async def _of_file(context: ServerContext, work: Callable[[KeyFile], Result]) -> Result:
    """ApiError where there is none, or it says no. Off the event loop: the disk is asked."""
    file = context.keyring.file
    if file is None:
        raise ApiError(
            "Keys are kept in a data directory, and this server has none (--data-dir).",
            status=409,
            code="no_data_dir",
        )
    return await asyncio.to_thread(done_with_file, lambda: work(file))


def done_with_file(work: Callable[[], Result]) -> Result:
    """ApiError for what it raises."""
    try:
        return work()
    except KeysError as error:
        raise ApiError(str(error), code="invalid_value") from None
    except OSError as error:
        reason = f"The keys cannot be read or written: {error.strerror or error}"
        raise ApiError(reason, status=503, code="storage_failed", headers={"retry-after": "5"}) from None


async def _body(request: Request, kind: type[Result]) -> Result:
    limits = context_of(request).options.limits
    return decode(await read_body(request, limits.body_bytes) or b"{}", kind, limits)


def _no_such_key() -> ApiError:
    return ApiError("There is no such key that holds.", status=404, code="key_not_found")
