"""In which shape a client is told that something went wrong: that of the API whose path it called."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic import errors as anthropic
from agentserve.server.sessions.origin import asked_by


def error_response(error: ApiError, scope: Scope) -> Response:
    """The reply to a request that passed the gate, which has given it an id."""
    if (origin := asked_by()) is not None:
        origin.refusal = error.code or error.kind
    if anthropic.speaks(scope):
        return anthropic.error_response(error, scope["state"]["request_id"])
    return error.response()
