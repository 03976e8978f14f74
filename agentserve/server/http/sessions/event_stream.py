"""GET …/events: what happens in a session, as server-sent events that can be taken up again."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError
from agentserve.server.http import query
from agentserve.server.http.context import context_of
from agentserve.server.http.sessions.lookup import found
from agentserve.server.http.sse import EventStream
from agentserve.server.json_line import dump_json
from agentserve.server.sessions.events import EventLog

_ID = re.compile(r"([0-9a-f]{1,32})-([0-9]{1,18})")
NOW = "now"


async def session_events(request: Request) -> Response:
    """From the event after `Last-Event-ID` (or `?after=`) on; without one from the oldest that is
    kept, with `after=now` what comes from now on. Where events were lost before or in between, a `gap`
    says so.

    The stream ends with the session.
    """
    context = context_of(request)
    session = found(context, request)
    log = context.chronicle.log_of(session)
    given = request.headers.get("last-event-id") or query.text(request, "after")
    return EventStream(frames_of(log, *place_of(log, given)), keep_alive=context.options.keep_alive_seconds)


def place_of(log: EventLog, given: str | None) -> tuple[int, bool]:
    """(the event after which to begin, whether others were lost before it)."""
    if given is None:
        return (log.first - 1, True) if log.goes_on else (0, False)
    if given == NOW:
        return log.last, False
    found = _ID.fullmatch(given)
    if found is None:
        raise ApiError("after: must be the id of an event, or `now`", param="after", code="invalid_event_id")
    number = int(found.group(2))
    if found.group(1) != log.name or number > log.last:  # of another session, or of an earlier server
        return log.first - 1, True
    return number, False


async def frames_of(log: EventLog, after: int, broken: bool) -> AsyncGenerator[bytes, None]:
    yield b"retry: 1000\n\n"
    if broken:
        yield _gap(log, after, None)
    while True:
        lost, event = log.since(after)
        if lost:
            turns_whole = after + 1 >= log.first
            after += lost
            yield _gap(log, after, lost, turns_whole=turns_whole)
        elif event is not None:
            after = event.number
            yield _event(log, after, event.kind, event.data)
        elif log.closed:
            return
        else:
            await log.wait()


def _gap(log: EventLog, after: int, lost: int | None, *, turns_whole: bool = False) -> bytes:
    """Events up to `after` are gone. `lost` None: it is not known how many. turns_whole: none of them was of
    a turn."""
    told = {"lost": lost, "next": after + 1, "turns_whole": turns_whole}
    return _event(log, after, "gap", dump_json(told))


def _event(log: EventLog, number: int, kind: str, data: bytes) -> bytes:
    return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (log.name.encode(), number, kind.encode(), data)
