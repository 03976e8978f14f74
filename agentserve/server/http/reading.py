"""Reading request bodies within bounds."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from agentserve.server.errors import ApiError
from agentserve.server.http.sse import ClientGone

_MOST = "most_bytes"  # in a request's state


def bound_body(scope: Scope, most: int) -> None:
    """This request's body is bounded more narrowly than others."""
    scope["state"][_MOST] = most


def most_bytes(request: Request, most: int) -> int:
    """Of this request's body, where `most` is what others may have."""
    own = request.scope.get("state", {}).get(_MOST)
    return min(own, most) if isinstance(own, int) else most


async def read_body(request: Request, most: int) -> bytes:
    """The whole body; more than `most` bytes are refused without reading them.

    A content type other than JSON is a 415: a web page may send those to any server unasked. None
    at all passes (simple clients send none; pages do, or an Origin the gate refuses).
    """
    most = most_bytes(request, most)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("", "application/json"):
        raise ApiError(
            f"The body must be application/json, not {kind[:80]!r}.",
            status=415,
            code="unsupported_media_type",
        )
    too_long = ApiError(
        f"The request body is larger than {most} bytes.", status=413, code="request_too_large"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > most):
        raise too_long
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_long
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)
