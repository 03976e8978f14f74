"""Reading request bodies within bounds."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from agentserve.server.errors import ApiError
from agentserve.server.http.sse import ClientGone


async def read_body(request: Request, most: int) -> bytes:
    """The whole body; more than `most` bytes are refused without reading them."""
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
