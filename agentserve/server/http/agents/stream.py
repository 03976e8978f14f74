"""GET …/events: the events of an agent's session, as they come, to be taken up again."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.agents.history import History
from agentserve.server.errors import ApiError
from agentserve.server.http import query
from agentserve.server.http.agents.lookup import session_of
from agentserve.server.http.agents.telling import event_id
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.names import SESSION_HEADER
from agentserve.server.http.sessions.event_stream import NOW, place_of
from agentserve.server.http.sse import EventStream, StreamForm
from agentserve.server.json_line import dump_json
from agentserve.server.sessions.events import EventLog

PLACE_HEADER = "last-event-id"  # in a reply: after which event its stream begins
ENDS = frozenset({"agent.session.idle", "agent.session.failed"})


async def follow_events(request: Request) -> Response:
    """What comes from now on, or after `Last-Event-ID` (`?after=`). Where events were lost in between, an
    `error` with the code `events_lost` says so: the lists of items and turns have all there is.

    The stream ends with the session. Closing it ends nothing.
    """
    context = context_of(request)
    history = session_of(context, request)
    given = request.headers.get("last-event-id") or query.text(request, "after") or NOW
    query.flag(request, "include_obfuscation")  # nothing is padded here
    return opened(context, history, given)


def opened(context: ServerContext, history: History, after: str, *, one_turn: bool = False) -> Response:
    """A stream of what comes after an event. `one_turn`: to the end of the first turn."""
    log = context.telling.log_of(history)
    number, broken = place_of(log, after)
    frames = frames_of(log, history.id, number, broken, one_turn=one_turn)
    return EventStream(
        frames,
        keep_alive=context.options.keep_alive_seconds,
        headers={SESSION_HEADER: history.id, PLACE_HEADER: event_id(log, number)},
        form=StreamForm(failure=lambda error: _frame(log, log.last, "error", _told(log, history.id, error))),
    )


async def frames_of(
    log: EventLog, session: str, after: int, broken: bool, *, one_turn: bool = False
) -> AsyncGenerator[bytes, None]:
    yield b": open\n\n"  # no `retry`: the openai SDK takes it for an event
    if broken:
        yield _gap(log, session, after, "an unknown number of")
    while True:
        lost, event = log.since(after)
        if lost:
            after += lost
            yield _gap(log, session, after, str(lost))
        elif event is not None:
            after = event.number
            yield _frame(log, after, event.kind, event.data)
            if one_turn and event.kind in ENDS:
                return
        elif log.closed:
            return
        else:
            await log.wait()


def _gap(log: EventLog, session: str, upto: int, lost: str) -> bytes:
    error = ApiError(f"{lost} events are no longer kept; list items and turns.", code="events_lost")
    return _frame(log, upto, "error", _told(log, session, error, upto))


def _told(log: EventLog, session: str, error: ApiError, number: int | None = None) -> bytes:
    shown = error.body()["error"]
    number = log.last if number is None else number
    return dump_json(
        {
            "type": "error",
            "event_id": f"{event_id(log, number)}-{error.code}",
            "session_id": session,
            "error": shown,
        }
    )


def _frame(log: EventLog, number: int, kind: str, data: bytes) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event_id(log, number).encode(), kind.encode(), data)
