"""Tells of sessions as they live: events to those who follow them, messages to the transcripts.

One place hears of all turns, whichever way they were begun, so a turn that came by one route is seen
by the readers of another. It decides nothing, and nothing it does can fail a turn.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agentserve.messages import StateChange
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.events import EventLog, EventLogs
from agentserve.server.sessions.session_record import Lease, Session
from agentserve.server.sessions.transcript import Told, Transcripts
from agentserve.server.sessions.turns import Piece, Started
from agentserve.server.text_port import JsonObject
from agentserve.types import SessionId


class Chronicle:
    def __init__(self, transcripts: Transcripts, events: EventLogs) -> None:
        self.transcripts = transcripts
        self.events = events

    def noted(self, session: Session, change: StateChange) -> None:
        """The engine reported a state of the turn that runs."""
        self._state(session, change.reason)

    def piece(self, lease: Lease, piece: Piece) -> None:
        """What a turn brought about; an outcome comes after its commit."""
        if isinstance(piece, Started):
            self.say(lease.session, "turn_started", epoch=lease.session.epoch, results=list(lease.answers))
        elif isinstance(piece, Delta):
            if piece.text or piece.calls:  # reasoning is no part of the answer
                self._delta(lease, piece)
        else:
            self._outcome(lease, piece)

    def committed(self, lease: Lease, told: Told | None, reply: JsonObject) -> None:
        """Called with the directory's commit, before anybody hears that the turn is done."""
        if told is None:
            self.transcripts.forget(lease.key)
        else:
            self.transcripts.committed(lease, told, reply)

    def words_after(self, lease: Lease, told: Told | None, reply: JsonObject) -> bytes:
        """The transcript as it will be once the turn is committed, for a book; empty: none."""
        return b"" if told is None else msgspec.msgpack.encode(self.transcripts.after(lease, told, reply))

    def rolled_back(self, lease: Lease, reason: str, *, vanished: bool) -> None:
        """Deltas of the turn are void. `vanished`: so is its session, which had no other turn."""
        session = lease.session
        self.say(session, "turn_rolled_back", turn=lease.turn, epoch=session.epoch, reason=reason)
        if vanished:
            self.gone(session.key, "its only turn was rolled back")
        else:
            self.transcripts.rolled_back(session.key)
            self._state(session, reason)

    def rested(self, session: Session, reason: str) -> None:
        """A wait of the session has ended without a turn of its own."""
        self._state(session, reason)

    def gone(self, key: SessionId, reason: str) -> None:
        """The session was closed, or forgotten for want of room or of use."""
        self.transcripts.forget(key)
        if key in self.events:
            self.events.publish(key, "closed", {"reason": reason})
            self.events.forget(key)

    def say(self, session: Session, kind: str, **data: object) -> None:
        """An event of a session; its turn is the last one where `data` names none."""
        self.log_of(session)
        told: Mapping[str, object] = {"turn": session.last_turn, **data}
        self.events.publish(session.key, kind, told)

    def log_of(self, session: Session) -> EventLog:
        """The session's events; they go on from others where an earlier process knew it."""
        ended = session.last_turn - (session.running is not None)
        return self.events.of(session.key, goes_on=ended > 0)

    def _state(self, session: Session, reason: str) -> None:
        self.say(session, "state", state=session.state.value, reason=reason)

    def _delta(self, lease: Lease, piece: Delta) -> None:
        data: dict[str, object] = {"turn": lease.turn}
        if piece.text:
            data["content"] = piece.text
        if piece.calls:
            data["tool_calls"] = [
                {"index": call.index, "id": call.id, "name": call.name, "arguments": call.arguments}
                for call in piece.calls
                if call.id is not None or call.arguments
            ]
        self.events.publish(lease.key, "delta", data)

    def _outcome(self, lease: Lease, outcome: Outcome) -> None:
        session = lease.session
        for call in outcome.calls if outcome.has_calls else ():
            self.say(
                session,
                "tool_call",
                turn=lease.turn,
                epoch=session.epoch,
                call_id=call.id,
                name=call.name,
                arguments=call.arguments,
            )
        self.say(
            session,
            "turn_completed",
            turn=lease.turn,
            reason=outcome.reason.value,
            content=outcome.text,
            tool_calls=len(outcome.calls),
            generated_tokens=outcome.usage.generated,
            prompt_tokens=outcome.usage.prompt,
            cached_tokens=outcome.usage.cached,
        )
        if outcome.usage.missed or outcome.usage.relegated:
            self.say(
                session,
                "slo_missed" if outcome.usage.missed else "relegated",
                turn=lease.turn,
                missed=list(outcome.usage.missed),
                relegated=outcome.usage.relegated,
            )
        self._state(session, "")
