"""Which session a path names."""

from __future__ import annotations

from starlette.requests import Request

from agentserve.server.errors import ApiError
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import ServerContext
from agentserve.server.sessions.session_record import Session


def found(context: ServerContext, request: Request) -> Session:
    """The session of the path's `name`; a 404 if there is none (any more).

    Look again after every `await`: sessions are closed at any time.
    """
    tenant, name = tenant_of(request), request.path_params["name"]
    session = context.directory.get(tenant, name)
    if session is not None and context.expired(session):
        context.expire()
        session = context.directory.get(tenant, name)
    if session is None:
        raise ApiError(f"No session {name[:128]!r}.", status=404, code="session_not_found")
    return session
