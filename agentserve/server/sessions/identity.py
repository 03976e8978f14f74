"""Names that come from outside: session ids, request ids. Checked, then never used as internal keys."""

from __future__ import annotations

import re
import secrets

from starlette.requests import Request

from agentserve.server.errors import ApiError
from agentserve.server.limits import Limits

DEFAULT_TENANT = "default"
SESSION_HEADER = "x-session-id"
REQUEST_HEADER = "x-request-id"

_NAME = re.compile(r"[A-Za-z0-9._:\-]+")


def new_session_id() -> str:
    return f"sess-{secrets.token_hex(12)}"


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


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
    if given and len(given) <= limits.request_id_chars and _NAME.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(12)}"


def _checked(name: str, param: str, longest: int) -> str:
    if not 1 <= len(name) <= longest or not _NAME.fullmatch(name):
        raise ApiError(
            f"{param}: must be 1 to {longest} characters out of A-Z a-z 0-9 . _ : -",
            param=param,
            code="invalid_session_id",
        )
    return name
