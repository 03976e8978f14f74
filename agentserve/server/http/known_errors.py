"""What goes wrong below HTTP, as this dialect tells it."""

from __future__ import annotations

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
)
from agentserve.server.sessions.room import DirectoryFull, TenantFull
from agentserve.server.tenants.accounts import SOON, OverLimit
from agentserve.text.errors import TextError

KNOWN = (ApiError, TurnError, EngineDown, DirectoryFull, OverLimit)

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


def bad_value(error: ValueError) -> ApiError:
    """A value from the client that a lower room does not take."""
    param, code = (error.param, error.code) if isinstance(error, TextError) else (None, None)
    return ApiError(str(error), param=param, code=code or "invalid_value")
