"""What a session's worker is told of it besides its turns: how it rests, what its client says of it, and
that nobody is expected back."""

from __future__ import annotations

from agentserve.messages import Devalue, Hint, Park
from agentserve.server.engine_port import Engine
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.session_record import Session
from agentserve.types import SessionState, TurnId
from tiering.hints import Heard


def park(engine: Engine, session: Session, turn: TurnId, now: float, *, waiting: bool) -> None:
    """Say what the end of a turn means, and all that the client has said that still holds."""
    names = tuple(call.name for call in session.pending.values()) if waiting else ()
    engine.park(Park(session.key, turn, waiting, names, session.said.hints(now)))


def advise(directory: SessionDirectory, engine: Engine, session: Session, heard: Heard, now: float) -> None:
    """Keep what a client said, and tell it now if the session rests; else its next park does."""
    left = session.left
    if heard.said == session.said and heard.news.expected_wait is None and left is None:
        return
    directory.departures.hinted(session, heard.said, now)
    if session.running is not None:
        return
    if left is not None and session.left is None and session.engine_turn is not None:
        waiting = session.state is SessionState.WAITING_TOOL
        park(engine, session, session.engine_turn, now, waiting=waiting)  # its client is there after all
    else:
        engine.tell(Hint(session.key, heard.news))


def settle(directory: SessionDirectory, engine: Engine, chronicle: Chronicle) -> None:
    """Tell everybody of sessions that were left behind, and of those that were forgotten, since the last
    call."""
    for left in directory.departures.take():
        session = directory.find(left.key)
        if session is None or session.left is not left.why:
            continue  # it has gone on since
        if left.waited:
            if session.engine_turn is not None:
                park(engine, session, session.engine_turn, left.at, waiting=False)
            chronicle.rested(session, left.reason)
        engine.tell(Devalue(left.key, left.why))
        chronicle.say(session, "devalued", why=left.why.value, reason=left.reason)
    for key in directory.take_evicted():
        engine.close(key)
        chronicle.gone(key, "unused for too long, or no room")
