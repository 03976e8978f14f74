"""Makes one response: runs its turn, folds it, and keeps what came of it before anybody is told."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing

from agentserve.server.errors import ApiError
from agentserve.server.http import choice_parts
from agentserve.server.http.context import ServerContext
from agentserve.server.http.known_errors import api_error
from agentserve.server.http.responses.desk import new_id
from agentserve.server.http.responses.diagnostics import Compared, diagnosed, facts_of
from agentserve.server.http.responses.events import Fold, Logprobs
from agentserve.server.http.responses.job import Job
from agentserve.server.http.responses.plan import Plan
from agentserve.server.http.responses.rounds import Rounds
from agentserve.server.http.responses.shelf import Kept
from agentserve.server.http.responses.shown import response_object, usage
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.sessions.transcript import write_json
from agentserve.server.sessions.turns import Started
from agentserve.server.text_port import JsonObject

log = logging.getLogger(__name__)


class Making:
    """From a plan and its turn to the events of the response. Its end is told once it is kept."""

    def __init__(self, context: ServerContext, plan: Plan, job: Job | None, rounds: Rounds) -> None:
        """`job` None: it has failed before it could begin, or begins with calls that were approved."""
        self.plan = plan
        self._rounds = rounds
        self._context = context
        self._job = job
        self._desk = context.responses
        self._open = True
        self._committed = False  # its session has the turn
        self.created = context.wall()
        body = plan.body
        conversation = plan.conversation
        shown = response_object(
            body,
            plan.box,
            id_=new_id("resp"),
            model=context.options.model,
            created=int(self.created),
            conversation=None if conversation is None else conversation.id,
        )
        shown["session_id"] = job.session if job is not None else None
        if job is not None:
            self._diagnose(shown, job.prompt)
        self.fold = Fold(
            shown,
            plan.box,
            new_id,
            logprobs=_logprobs(context, job),
            packs_reasoning="reasoning.encrypted_content" in (body.include or ()),
        )
        self.error: ApiError | None = None  # why it failed
        self._begun = self._spoke = False  # its first events were told, all of them
        self._ids = array("i")  # of its last prompt and the reply
        self._said: Outcome | None = None  # what its last turn came to
        self._owed = False  # its session waits for results that nobody else brings
        self._upto = conversation.next if conversation is not None else 0

    def close(self) -> None:
        """Undo what was taken for it. Idempotent; a turn that has ended is not touched."""
        if not self._open:
            return
        self._open = False
        if self._job is not None:
            self._job.rollback()
            if self._owed:
                self._rounds.let_go(self._job.session)
        self.plan.hold.release()

    async def events(self, *, begun: bool = False) -> AsyncGenerator[list[JsonObject], None]:
        """The events as they come; a failure that comes before the first of them is raised.

        `begun`: some were told already.
        """
        self._begun = begun
        fold = self.fold
        try:
            async with aclosing(self._all_turns()) as all_events:
                async for events in all_events:
                    yield events
        except Exception as error:
            told = api_error(error)
            if told is None and not self._begun:
                raise
            if told is None:
                log.exception("a response failed")
                told = ApiError("Internal error.", status=500, code="internal_error")
            if not self._begun:
                raise told from None
            self._fail(told)
        await self._keep_or_fail()
        if self.error is None and self._ids and self._job is not None:
            compared = Compared(self._ids, len(self._job.prompt), facts_of(fold.response))
            self._desk.remember(self.plan.hold.tenant, fold.response["id"], compared)
        yield fold.ended()

    async def _all_turns(self) -> AsyncGenerator[list[JsonObject], None]:
        """Model calls, and between them the calls of tools that this server makes."""
        fold, rounds = self.fold, self._rounds
        if self._job is None:
            yield self._first_words()
            yield [event for request in self.plan.approved for event in fold.mcp.approved(request)]
            yield await self._called(goes_on=True)
        while True:
            async with aclosing(self._turn()) as all_events:
                async for events in all_events:
                    yield events
            said, calls = self._said, fold.mcp.open
            if said is None or not calls:
                return
            spent = rounds.left(fold.generated) == 0
            goes_on = len(calls) == len(said.calls) and not spent
            yield await self._called(goes_on=goes_on)
            if not goes_on:
                self._owed = spent  # else its client brings the other results
                fold.complete(said, int(self._context.wall()), cut=spent)
                return

    async def _called(self, *, goes_on: bool) -> list[JsonObject]:
        """The open calls are made; with their results the next turn is leased, where it `goes_on`. Their
        ends are told then: a result that does not fit becomes another one."""
        fold, rounds = self.fold, self._rounds
        names = [item["id"] for item in fold.mcp.open]
        for name, outcome in zip(names, await rounds.run(fold.mcp.open), strict=True):
            fold.mcp.put(name, outcome)
        if goes_on:
            session = None if self._job is None else self._job.session
            self._job = await rounds.next(fold.response["output"], names, session, fold.generated)
            fold.response["session_id"] = self._job.session
        return [event for name in names for event in fold.mcp.ran(name)]

    async def _turn(self) -> AsyncGenerator[list[JsonObject], None]:
        assert self._job is not None
        self._said = None
        async with aclosing(self._context.runner.choices([self._job.specs])) as pieces:
            async for _, piece in pieces:
                if isinstance(piece, Started):
                    yield self._first_words()
                elif isinstance(piece, Delta):
                    if piece and not self.plan.body.prewarm:
                        yield self.fold.delta(piece)
                else:
                    self._committed = True
                    self._ids = self._job.prompt + array("i", piece.ids)
                    yield self._finished(piece)

    def _first_words(self) -> list[JsonObject]:
        """What is told before all else, once."""
        if self._spoke:
            return []
        self._spoke = True
        events = [] if self._begun else self.fold.created()
        self._begun = True
        return [*events, *self.fold.in_progress(), *self.fold.mcp.listed(self.plan.listings)]

    async def failed(self, error: ApiError) -> list[JsonObject]:
        """All events of a response that could not begin."""
        events = self.fold.created() + self.fold.in_progress()
        self._fail(error)
        await self._keep_or_fail()
        return events + self.fold.ended()

    async def cancelled(self) -> list[JsonObject]:
        """The last events of one that was stopped."""
        events = self.fold.cancel()
        await self._keep_or_fail()
        return [*events, *self.fold.ended()]

    async def keep(self, *, running: bool = False) -> None:
        """Have it, as it is now, where it is found again. StorageFailed: its conversation is as before."""
        conversations, plan = self._desk.conversations, self.plan
        owed = [self._desk.shelf.put(self._record(running))] if plan.body.stored else []
        grows = plan.conversation is not None and not plan.body.prewarm
        current = conversations.get(plan.conversation.id) if plan.conversation is not None else None
        if not grows or current is None or self.fold.response["status"] not in ("completed", "incomplete"):
            await _all_booked(owed)
            return
        shown, before = self.fold.response, current.session
        items = [*plan.items, *shown["output"]]
        owed.append(conversations.add(current, items, shown["session_id"]))
        try:
            await _all_booked(owed)
        except StorageFailed:
            conversations.take_back(current, [item["id"] for item in items], before)
            raise

    def _record(self, running: bool) -> Kept:
        plan, shown = self.plan, self.fold.response
        return Kept(
            id=shown["id"],
            tenant=plan.hold.tenant,
            created=self.created,
            items=write_json(plan.items),
            response=write_json(shown),
            parent=plan.parent.id if plan.parent is not None else None,
            conversation=plan.conversation.id if plan.conversation is not None else None,
            upto=self._upto,
            session=shown["session_id"],
            sequence=self.fold.sequence + (not running),  # its end is still to be told
            names=tuple(item["id"] for item in (*plan.items, *shown["output"])),
            running=running,
            untold=bool(plan.body.background)
            and not running
            and self._context.hooks.wants(plan.hold.tenant, f"response.{shown['status']}"),
        )

    def _finished(self, outcome: Outcome) -> list[JsonObject]:
        """A turn is over: so is the response, unless this server has calls to make."""
        now, fold = int(self._context.wall()), self.fold
        if self.plan.body.prewarm:
            fold.prewarmed(usage([outcome.usage], generated=0), now)
            return []
        events = fold.said(outcome)
        self._said = outcome
        self._owed = bool(fold.mcp.open)
        if not self._owed:
            fold.complete(outcome, now)
        return events

    def _fail(self, error: ApiError) -> None:
        self.error = error
        self.fold.fail(error)

    async def _keep_or_fail(self) -> None:
        try:
            await self.keep()
        except StorageFailed as error:
            told = api_error(error)
            assert told is not None
            self._fail(told)
            if self._committed and self._job is not None:  # what its client does next goes on from before
                self._job.unheard("its response could not be kept")
            if self.plan.body.stored:
                self._desk.shelf.put(self._record(False))

    def _diagnose(self, shown: JsonObject, prompt: array[int]) -> None:
        options = self.plan.body.prompt_cache_options
        if options is None or options.comparison_response_id is None:
            return
        id_ = options.comparison_response_id
        earlier = self._desk.compared(self.plan.hold.tenant, id_)
        if earlier is not None:
            shown["prompt_cache_diagnostics"] = diagnosed(earlier, prompt, facts_of(shown))
        elif (kept := self._desk.shelf.get(id_)) is not None and kept.tenant == self.plan.hold.tenant:
            shown["prompt_cache_diagnostics"] = {"type": "unavailable"}
        else:
            shown["prompt_cache_diagnostics"] = {"type": "comparison_response_not_found"}


async def _all_booked(owed: list[Future[None] | None]) -> None:
    for change in owed:
        await booked(change)


def _logprobs(context: ServerContext, job: Job | None) -> Logprobs | None:
    if job is None or job.logprobs is None:
        return None
    most = job.logprobs
    return lambda tokens: choice_parts.chat_logprobs(tokens, context.tokenizer, most)["content"]
