"""Whom turns run for: a session of the directory, or nobody (a text completion)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import sha256

from agentserve.clock import Clock
from agentserve.messages import StateChange
from agentserve.server.engine_port import Engine
from agentserve.server.sessions.advice import park, settle
from agentserve.server.sessions.answer import Outcome
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.session_record import CommittedTurn, Lease, committed_turn
from agentserve.server.sessions.transcript import Told
from agentserve.server.sessions.turns import Piece
from agentserve.server.text_port import JsonObject
from agentserve.text.unfinished import told_as_text
from agentserve.types import SessionId, TurnId

Chain = Callable[[bytes, JsonObject], bytes]
"""The canonical key of a history: chain(key of what came before, message)."""


def chain_keys(chain: Chain, messages: list[JsonObject], salt: str | None = None) -> tuple[bytes, ...]:
    """A key per message. Histories of different salts never share one, so neither do their sessions."""
    keys: list[bytes] = []
    key = b"" if salt is None else sha256(b"salt " + salt.encode("utf-8", "surrogatepass")).digest()
    for message in messages:
        key = chain(key, message)
        keys.append(key)
    return tuple(keys)


def reply_message(outcome: Outcome) -> JsonObject:
    """The assistant message as a client will send it back."""
    message: JsonObject = {"role": "assistant", "content": outcome.text}
    if outcome.reasoning:
        message["reasoning_content"] = outcome.reasoning
    if outcome.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in outcome.calls
        ]
    return message


class SessionSeat:
    """A turn of a session in the directory."""

    def __init__(
        self,
        lease: Lease,
        directory: SessionDirectory,
        engine: Engine,
        clock: Clock,
        chain: Chain,
        *,
        chronicle: Chronicle,
        told: Told | None = None,
    ) -> None:
        """`told`: what the request said; None where nobody need be able to go on without saying it again."""
        self.lease = lease
        self._directory = directory
        self._engine = engine
        self._clock = clock
        self._chain = chain
        self._chronicle = chronicle
        self._told = told
        self.tail = ""  # what the turn's prompt ends with, behind its last message; "": not known
        self._over = False
        self._written = False  # words of it may be on disk

    @property
    def key(self) -> SessionId:
        return self.lease.key

    @property
    def turn(self) -> TurnId:
        return self.lease.turn

    @property
    def live(self) -> bool:
        return self._directory.holds(self.lease)

    def note(self, change: StateChange) -> None:
        self._directory.note(self.lease.session, change.turn, change.state, change.at, change.reason)
        if self.live and change.turn == self.turn:
            self._chronicle.noted(self.lease.session, change)

    def watch(self, piece: Piece) -> None:
        if self._directory.find(self.key) is not None:  # what is closed keeps no events
            self._chronicle.piece(self.lease, piece)

    async def begun(self) -> None:
        await booked(self.lease.booked)

    def keep_results(self) -> None:
        """The results that the turn begins with outlive the server, should it die with the turn: who sends
        them again finds them taken. Nobody waits for it."""
        if self._directory.durable:
            self._written = True
            self._keep_words()

    async def commit(self, prompt: array[int], outcome: Outcome) -> bool:
        turn = self._committed(prompt, outcome)  # before anything is changed: an error here rolls back
        reply = reply_message(outcome)
        if self._directory.durable:
            words = self._chronicle.words_after(self.lease, self._told, reply)
            self._written = True
            await booked(self._directory.write(self.lease, turn, words))  # so does one here, or a cancel
        self._over = True
        done = self._directory.commit(self.lease, turn)
        if done:
            self._chronicle.committed(self.lease, self._told, reply)
            park(self._engine, self.lease.session, self.turn, turn.at, waiting=bool(turn.calls))
        else:  # closed meanwhile; the engine must not keep what nobody will name again
            self._engine.close(self.key)
            self._chronicle.gone(self.key, "closed while its turn ran")
        self._settle()
        return done

    def _committed(self, prompt: array[int], outcome: Outcome) -> CommittedTurn:
        usage = outcome.usage
        calls = [(call.id, call.name, call.arguments) for call in outcome.calls] if outcome.has_calls else []
        generated = len(outcome.tokens if outcome.generated is None else outcome.generated)
        return committed_turn(
            self.lease,
            reply=self._reply_key(outcome),
            length=len(prompt) + generated,
            generated=outcome.generated,
            calls=calls,
            handed=outcome.handed,
            now=self._clock.now(),
            tail=self.tail,
            usage={
                "prompt_tokens": usage.prompt,
                "cached_tokens": usage.cached,
                "completion_tokens": usage.generated,
                "computed_tokens": usage.computed,
                "preemptions": usage.preemptions,
                "swaps": usage.swaps,
                "migrations": usage.migrations,
            },
        )

    def rollback(self, reason: str, *, abandoned: bool = False) -> None:
        if self._over:
            return
        self._over = True
        now = self._clock.now()
        vanished = self._directory.rollback(self.lease, now, reason, abandoned=abandoned)
        if vanished:
            self._engine.close(self.key)
        else:  # it ended the engine's wait, where there was one: the results are still to come
            session = self.lease.session
            # The worker may never have got this turn; of the two numbers it takes the one that it knows.
            turns = {turn for turn in (session.engine_turn, self.turn) if turn is not None}
            for turn in sorted(turns):
                park(self._engine, session, turn, now, waiting=bool(session.pending))
        self._chronicle.rolled_back(self.lease, reason, vanished=vanished)
        if self._written and not vanished:
            self._keep_words()
        self._settle()

    def _keep_words(self) -> None:
        self._directory.keep_words(self.lease.session, self._chronicle.transcripts.export(self.key))

    def _reply_key(self, outcome: Outcome) -> bytes:
        before = self.lease.keys[-1] if self.lease.keys else b""
        cut = {call for call, runs in outcome.handed.items() if not runs}
        # Such a call is no part of the key: some clients send it back, others go on without it.
        [message] = told_as_text([reply_message(outcome)], cut, shown=False)
        return self._chain(before, dict(message))

    def _settle(self) -> None:
        settle(self._directory, self._engine, self._chronicle)


class OneShotSeat:
    """A turn without a session: its KV may stay as cached prefix, nothing else does."""

    def __init__(self, key: SessionId, engine: Engine) -> None:
        self.key = key
        self.turn = TurnId(1)
        self._engine = engine
        self._over = False

    @property
    def live(self) -> bool:
        return not self._over

    def note(self, change: StateChange) -> None:
        """Nobody asks for the state of a one-shot turn."""

    async def begun(self) -> None:
        """It has no number that must not be lost."""

    async def commit(self, prompt: array[int], outcome: Outcome) -> bool:
        self.rollback("done")
        return True

    def rollback(self, reason: str, *, abandoned: bool = False) -> None:
        if not self._over:
            self._over = True
            self._engine.close(self.key)
