"""Whom a request comes from. Its tenant is what its key says, and is asked for in one place, here."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import Scope

from agentserve.server.errors import ApiError
from agentserve.server.tenants.keys import Caller

ASKS = {"www-authenticate": "Bearer"}
_ABOUT = "about"
_CALLER = "caller"  # in the scope's state; only the gate puts it there


def let_in(scope: Scope, caller: Caller) -> None:
    """The gate's word on whom a request comes from."""
    scope["state"][_CALLER] = caller


def caller_in(scope: Scope) -> Caller | None:
    """None: the gate let nobody in."""
    found = scope.get("state", {}).get(_CALLER)
    return found if isinstance(found, Caller) else None


def tenant_of(request: HTTPConnection) -> str:
    """The tenant that a request acts for. ApiError where it acts for none."""
    caller = caller_in(request.scope)
    if caller is None:
        raise no_key()
    if caller.tenant is None:
        raise not_a_tenant()
    return caller.tenant


def about(request: HTTPConnection, subject: str) -> None:
    """For the audit log: which key or tenant an admin's request was about."""
    request.scope["state"][_ABOUT] = subject


def subject_of(scope: Scope) -> str | None:
    found = scope["state"].get(_ABOUT)
    return found if isinstance(found, str) else None


def no_key() -> ApiError:
    return ApiError("A valid API key is needed.", status=401, code="invalid_api_key", headers=ASKS)


def not_a_tenant() -> ApiError:
    return ApiError(
        "This acts for a tenant; an admin's key is no tenant's.", status=403, code="tenant_key_needed"
    )


def not_an_admin() -> ApiError:
    return ApiError("This needs an admin's key.", status=403, code="admin_key_needed")
