"""POST …/tool_results/{call_id}/stream: a tool's output as the body, while it is produced.

The worker hears that the result is coming when the connection opens, and again with its first bytes;
as it grows, what is certain of the next prompt is told, to be computed ahead. Only the end of the
body makes it a result: an upload that breaks off leaves nothing.
"""

from __future__ import annotations

import codecs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from agentserve.server.errors import ApiError
from agentserve.server.http import query
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import most_bytes
from agentserve.server.http.sessions.going_on import TurnOptions
from agentserve.server.http.sessions.growing import Growing
from agentserve.server.http.sessions.lookup import found
from agentserve.server.http.sessions.results import take
from agentserve.server.http.sessions.taking import Incoming, sort_out
from agentserve.server.http.sse import ClientGone
from agentserve.server.limits import Limits, check_text
from agentserve.server.sessions.advice import welcome_back
from agentserve.server.sessions.session_record import Session
from tiering.policy.base import Signal


async def tool_result_stream(request: Request) -> Response:
    """`?epoch=`, `?stream=true` and `?max_tokens=` are as in the body of a plain result."""
    context = context_of(request)
    call = request.path_params["call_id"]
    epoch = query.whole(request, "epoch")
    options = TurnOptions(stream=query.flag(request, "stream"), max_tokens=query.whole(request, "max_tokens"))
    options.check()
    session = found(context, request)
    _check_call(context, session, call, epoch)
    welcome_back(context.directory, context.engine, session, context.clock.now())
    growing = Growing(context, session, call)
    try:
        growing.signal(Signal.CONNECTED)
        content = await _text(request, context.options.limits, growing)
    except BaseException:
        await growing.end(broken=True)
        raise
    await growing.end()
    check_text([content], context.options.limits, "body")
    return await take(context, request, [Incoming.checked(call, content, epoch, "body")], options)


def _check_call(context: ServerContext, session: Session, call: str, epoch: int | None) -> None:
    """Refuse what cannot be taken whatever the body will be, before it is read."""
    kept = context.chronicle.transcripts.get(session.key)
    known = (kept.held.get(call) or kept.answers.get(call)) if kept else None
    sort_out(session, kept, [Incoming(call, "", known.digest if known else b"", epoch)])


async def _text(request: Request, limits: Limits, growing: Growing) -> str:
    """The body as text, read to its end."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []
    size, chars, most = 0, 0, most_bytes(request, limits.body_bytes)
    try:
        async for part in request.stream():
            if part and not size:
                growing.signal(Signal.STREAMING)
            size += len(part)
            if size > most:
                raise ApiError(
                    f"The tool's output is larger than {most} bytes.",
                    status=413,
                    code="request_too_large",
                )
            parts.append(decoder.decode(part))
            chars += len(parts[-1])
            growing.grown(parts, chars)
        parts.append(decoder.decode(b"", final=True))
    except ClientDisconnect:
        raise ClientGone from None
    except UnicodeDecodeError:
        raise ApiError("The tool's output is not UTF-8.", param="body", code="invalid_text") from None
    return "".join(parts)
