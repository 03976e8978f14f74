"""The session of the directory that an agent session is: its turns are chat turns, like everybody's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from agentserve.server.agents.history import History
from agentserve.server.agents.ports import Generation, NotYet
from agentserve.server.agents.records import AgentConfig, Failure, Output
from agentserve.server.agents.texts import NO_RESULT, messages_of
from agentserve.server.errors import ApiError
from agentserve.server.http.agents.asked import chat_request
from agentserve.server.http.chat_request import ChatJob, prepare_turns
from agentserve.server.http.claims import cut_calls
from agentserve.server.http.context import ServerContext
from agentserve.server.http.known_errors import KNOWN, api_error
from agentserve.server.http.said import heed
from agentserve.server.http.sessions.results import Taken, hold
from agentserve.server.http.sessions.taking import Incoming, turn_running, went_on
from agentserve.server.sessions.advice import advise, park, settle, welcome_back
from agentserve.server.sessions.session_record import NO_TURN, Claim, Lease, PendingCall, Session
from agentserve.server.sessions.transcript import Held, Transcript, read_messages, result_digest, write_json
from agentserve.server.sessions.turns import Piece
from agentserve.server.text_port import JsonObject
from agentserve.text.unfinished import told_as_text
from tiering.hints import hear

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """A `Generation`."""

    context: ServerContext
    job: ChatJob

    @property
    def number(self) -> int:
        return self.job.seats[0].turn

    def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        return self.context.runner.choices([self.job.specs])

    def rollback(self) -> None:
        self.job.rollback()


class ChatLine:
    """A `Line`."""

    def __init__(self, context: ServerContext, history: History) -> None:
        self._context = context
        self._history = history
        self._tenant = history.head.tenant
        self._id = history.id
        self._lost: dict[str, Output] = {}  # results that came while the directory had no session

    @property
    def session(self) -> Session | None:
        """None before the first turn is begun, and where the directory had to forget it."""
        return self._context.directory.get(self._tenant, self._id)

    def pending(self) -> Sequence[PendingCall]:
        session, turn = self.session, self._history.active
        if session is not None:
            return list(session.pending.values())
        waits = [] if turn is None else self._history.open_calls(turn)
        return [PendingCall(call.call, call.name, call.arguments, NO_TURN) for call in waits]

    @property
    def forgotten(self) -> bool:
        return bool(self._lost)

    def held(self) -> Mapping[str, Output]:
        session, kept = self.session, self._kept()
        if session is None or kept is None:
            return dict(self._lost)
        held = self._context.chronicle.transcripts.certain(session.key)
        return self._lost | {
            call: msgspec.json.decode(held[call].content) for call in session.pending if call in held
        }

    async def begin(self, config: AgentConfig, messages: Sequence[JsonObject], *, first: bool) -> Generation:
        session = self.session
        if session is None or not session.committed:
            if session is not None:
                raise turn_running(session)
            if not first and any(call.id not in self._lost for call in self.pending()):
                raise NotYet
            earlier = self._rebuilt(config)
            return await self._lease(config, [*earlier, *messages], first=first)
        async with self._context.exclusive.of(session.key):
            return await self._lease(config, [*self._said(session, first=first), *messages], first=first)

    def _said(self, session: Session, *, first: bool) -> list[JsonObject]:
        """The history, with a result for each call of its last turn."""
        kept = self._kept()
        if session.running is not None:
            raise turn_running(session)
        if kept is None:
            return self._rebuilt(self._history.head.config)
        said = read_messages(kept.messages)
        for call in session.pending:
            held = kept.held.get(call)
            if held is None and not first:
                raise NotYet
            content = NO_RESULT if held is None else msgspec.json.decode(held.content)
            said.append({"role": "tool", "tool_call_id": call, "content": content})
        return said

    def _rebuilt(self, config: AgentConfig) -> list[JsonObject]:
        """The history of a session that the directory, or whose messages the transcripts had to forget."""
        opening = [{"role": "system", "content": config.instructions}] if config.instructions else []
        return [*opening, *messages_of(self._history, self._lost)]

    def _restore(self, session: Session) -> None:
        """Its messages had to go while it waited: results need a place to be held."""
        messages = self._rebuilt(self._history.head.config)[: len(session.chain)]
        steps = (batch.step for batch in reversed(self._history.batches) if batch.step is not None)
        marks = ((next(steps, session.last_turn), len(messages)),)
        transcript = Transcript(session.key, write_json(messages), b"{}", marks)
        self._context.chronicle.transcripts.restore(transcript)

    async def _lease(self, config: AgentConfig, messages: list[JsonObject], *, first: bool) -> Generation:
        context = self._context

        def begin(claim: Claim) -> Lease:
            session, now = self.session, context.clock.now()
            if session is None:
                turns = self._history.steps
                return context.directory.begin(replace(claim, named=self._id, turns=turns), now)
            lease = context.directory.extend(session, claim.keys, now)
            if lease is None:
                raise turn_running(session) if session.running is not None else went_on(session)
            return lease

        asked = chat_request(config, messages, first=first)
        job = await prepare_turns(context, self._tenant, asked, begin)
        for seat in job.seats:
            seat.keep_results()
        self._heed_early(job.seats[0].lease.session)
        return ChatGeneration(context, job)

    def _heed_early(self, session: Session) -> None:
        """What its client said of the session before there was one counts from its first turn on."""
        head, now = self._history.head, self._context.wall()
        if not head.hints:
            return
        if session.committed:
            head.hints = {}
            self._context.agents.shelf.keep_head(self._history)
            return
        heed(self._context, session, {name: hint.due(name, now) for name, hint in head.hints.items()})

    async def hold(self, results: Mapping[str, Output]) -> object:
        session = self.session
        if session is None:  # it goes on all the same: its history is here, and is computed again
            before = dict(self._lost)
            for call, content in results.items():
                if result_digest(self._lost.setdefault(call, content)) != result_digest(content):
                    self._lost = before
                    raise ApiError(
                        f"{call[:80]!r} has another result already.", status=409, code="result_conflict"
                    )
            return before
        async with self._context.exclusive.of(session.key):
            if self._kept() is None:
                self._restore(session)
            incoming = [
                Incoming.checked(call, content, None, f"results[{i}]")
                for i, (call, content) in enumerate(results.items())
            ]
            return await hold(self._context, session, incoming)

    def give_back(self, before: object) -> None:
        if isinstance(before, dict):
            self._lost = before
            return
        assert isinstance(before, Taken)
        session = self.session
        if before.before is not None and session is not None:
            self._context.give_back(session, before.before)

    def replace(self, call: str, output: Output) -> None:
        session = self.session
        if call in self._lost:
            self._lost[call] = output
        elif session is not None and self._kept() is not None:
            held = Held(msgspec.json.encode(output), result_digest(output), session.epoch)
            self._context.chronicle.transcripts.take(session.key, {call: held})

    def committed_reply(self) -> tuple[int, JsonObject, bool] | None:
        kept = self._kept()
        if kept is None:
            return None
        said = read_messages(kept.messages)[-1:]
        cut = cut_calls(self._context, self._tenant, said)
        [reply] = told_as_text(said, cut, shown=False)
        return kept.marks[-1][0], dict(reply), not cut

    def stop_waiting(self, reason: str) -> None:
        context, session = self._context, self.session
        if session is None or session.running is not None:
            return
        now = context.clock.now()
        if context.directory.release(session, now, reason, None) and session.engine_turn is not None:
            park(context.engine, session, session.engine_turn, now, waiting=False)
            context.chronicle.rested(session, reason)
            settle(context.directory, context.engine, context.chronicle)
        welcome_back(context.directory, context.engine, session, now)  # its client goes on with it

    def expect(self, seconds: float) -> None:
        context, session = self._context, self.session
        if session is None or session.running is not None or session.said.wait.deadline is not None:
            return  # its client has said so itself
        now = context.clock.now()
        held = context.engine.holds(session.key)
        heard = hear(session.said, {"deadline": seconds}, now, running=False, held=held)
        advise(context.directory, context.engine, session, heard, now)

    def explain(self, error: Exception) -> Failure | None:
        told = api_error(error) if isinstance(error, KNOWN) else None
        if told is None:
            return None
        return Failure(_code(told), told.message, told.code == TOO_LONG)

    def _kept(self) -> Transcript | None:
        session = self.session
        return None if session is None else self._context.chronicle.transcripts.get(session.key)


def _code(error: ApiError) -> str:
    """As the API names failures of turns."""
    if error.code == TOO_LONG:
        return TOO_LONG
    if error.status == 404:
        return "resource_not_found"
    if error.status == 503:
        return "server_overloaded"
    return "server_error" if error.status >= 500 else "invalid_request"
