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
    news = heard.said != session.said or heard.news.expected_wait is not None
    if news:
        directory.departures.hinted(session, heard.said, now)
    if not welcome_back(directory, engine, session, now) and news and session.running is None:
        engine.tell(Hint(session.key, heard.news))


def welcome_back(directory: SessionDirectory, engine: Engine, session: Session, now: float) -> bool:
    """A client is heard of: a session of its that nobody was expected back to rests as others do. Whether
    its worker was told so, and all that holds of it."""
    if not directory.departures.back(session, now) or session.running is not None:
        return False
    if session.engine_turn is None:
        return False
    park(engine, session, session.engine_turn, now, waiting=session.state is SessionState.WAITING_TOOL)
    return True


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
