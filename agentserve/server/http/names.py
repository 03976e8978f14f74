"""Names that requests bring in headers and bodies: session ids, request ids."""

from __future__ import annotations

import secrets

from starlette.requests import Request

from agentserve.server.errors import ApiError
from agentserve.server.limits import Limits
from agentserve.server.sessions.identity import is_name

SESSION_HEADER = "x-session-id"
REQUEST_HEADER = "x-request-id"


def session_name(request: Request, in_body: str | None, limits: Limits) -> str | None:
    """The session id a client gives, the body's before the header's; a bad one is a 400."""
    if in_body is not None:
        return _checked(in_body, "session_id", limits.session_id_chars)
    in_header = request.headers.get(SESSION_HEADER)
    if in_header is not None:
        return _checked(in_header, "X-Session-ID", limits.session_id_chars)
    return None


def request_id(given: str | None, limits: Limits) -> str:
    """The client's request id where it is clean, else a fresh one. It labels, and identifies nothing."""
    if given is not None and is_name(given, limits.request_id_chars):
        return given
    return f"req-{secrets.token_hex(12)}"


def set_request_id(request: Request, in_body: str | None, limits: Limits) -> None:
    """Let the body's request id name this request in the reply's header."""
    if in_body is not None:
        request.state.request_id = request_id(in_body, limits)


def _checked(name: str, param: str, longest: int) -> str:
    if not is_name(name, longest):
        raise ApiError(
            f"{param}: must be 1 to {longest} characters out of A-Z a-z 0-9 . _ : -",
            param=param,
            code="invalid_session_id",
        )
    return name
