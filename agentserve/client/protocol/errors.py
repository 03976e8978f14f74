"""What can go wrong, by what a caller can do about it."""

from __future__ import annotations

from collections.abc import Mapping


class ClientError(Exception):
    """Everything that this package raises by itself is one of these."""


class ConnectionFailed(ClientError):
    """The server cannot be reached, or did not answer, for as long as was to be tried."""


class StreamLost(ConnectionFailed):
    """The events of a turn cannot be followed any more. The turn goes on: `session.resume()` finds it."""


class BadReply(ClientError):
    """The server said something that is not of the protocol."""


class TurnFailed(ClientError):
    """A turn did not complete: `result.raise_for_status()`."""

    def __init__(self, message: str, status: str, code: str | None) -> None:
        super().__init__(message)
        self.status = status  # "failed" or "cancelled"
        self.code = code


class StatusError(ClientError):
    """The server refused."""

    def __init__(
        self, status: int, message: str, code: str | None = None, details: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.code = code
        self.details = dict(details or {})  # the error object, as it came


class BadRequest(StatusError):
    """400."""


class Unauthorized(StatusError):
    """401: no key, or a wrong one."""


class Forbidden(StatusError):
    """403."""


class NotFound(StatusError):
    """404: a session of somebody else's is not there either."""


class Conflict(StatusError):
    """409: a turn of the session runs, a call has another result, …: see `code`."""


class TooLarge(StatusError):
    """413."""


class Unprocessable(StatusError):
    """422."""


class RateLimited(StatusError):
    """429, for longer than was to be tried."""


class ServerFailed(StatusError):
    """5xx, for as long as was to be tried."""


_BY_STATUS: dict[int, type[StatusError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Unprocessable,
    429: RateLimited,
}


def status_error(
    status: int, message: str, code: str | None, details: Mapping[str, object] | None = None
) -> StatusError:
    kind = _BY_STATUS.get(status, ServerFailed if status >= 500 else StatusError)
    return kind(status, message, code, details)
