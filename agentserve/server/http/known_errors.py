"""What goes wrong below HTTP, as this dialect tells it."""

from __future__ import annotations

import math

from agentserve.server.engine_port import EngineDown
from agentserve.server.errors import ApiError
from agentserve.server.http.rates import over_limit
from agentserve.server.sessions.errors import (
    SessionClosed,
    StorageFailed,
    TurnCancelled,
    TurnError,
    TurnFailed,
    TurnRefused,
    TurnShed,
)
from agentserve.server.sessions.room import DirectoryFull, TenantFull
from agentserve.server.tenants.accounts import SOON, OverLimit
from agentserve.text.errors import TextError

KNOWN = (ApiError, TurnError, EngineDown, DirectoryFull, OverLimit)

MOST_WAIT = 3600  # seconds that anybody is told to wait

_TURNS: dict[type[TurnError], tuple[int, str]] = {
    TurnRefused: (400, "request_refused"),
    TurnFailed: (500, "engine_error"),
    TurnCancelled: (409, "turn_cancelled"),
    SessionClosed: (409, "session_closed"),
    StorageFailed: (503, "storage_failed"),
}


def api_error(error: Exception) -> ApiError | None:
    """The reply to a KNOWN error; None for one that is a fault of ours."""
    match error:
        case ApiError():
            return error
        case TurnShed():
            return _overloaded(error)
        case TurnError():
            status, code = _TURNS[type(error)]
            return ApiError(str(error), status=status, code=code)
        case EngineDown():
            return ApiError(str(error), status=503, headers={"retry-after": "1"})
        case OverLimit():
            return over_limit(error)
        case TenantFull():
            return over_limit(OverLimit("sessions", f"{str(error).capitalize()}.", SOON))
        case DirectoryFull():
            return ApiError(f"The server is full: {error}.", status=503, headers={"retry-after": "1"})
    return None


def _overloaded(error: TurnShed) -> ApiError:
    """503, as for every other thing that the server has too much of: a 429 says that its client asks for more
    than it may, and clients that meter themselves by it would slow down for others' load."""
    wait = min(max(1, math.ceil(error.wait)), MOST_WAIT)
    return ApiError(
        f"{error} Please try again in {wait} s.",
        status=503,
        code="slo_unattainable",
        headers={"retry-after": str(wait), "x-should-retry": "true"},
        details={"retry_after": wait},
    )


def bad_value(error: ValueError) -> ApiError:
    """A value from the client that a lower room does not take."""
    param, code = (error.param, error.code) if isinstance(error, TextError) else (None, None)
    return ApiError(str(error), param=param, code=code or "invalid_value")
