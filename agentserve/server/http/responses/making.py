"""Makes one response: runs its turn, folds it, and keeps what came of it before anybody is told."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing

from agentserve.server.errors import ApiError
from agentserve.server.http import wire
from agentserve.server.http.context import ServerContext
from agentserve.server.http.responses.desk import new_id
from agentserve.server.http.responses.diagnostics import Compared, diagnosed, facts_of
from agentserve.server.http.responses.events import Fold, Logprobs
from agentserve.server.http.responses.job import Job
from agentserve.server.http.responses.plan import Plan
from agentserve.server.http.responses.shelf import Kept
from agentserve.server.http.responses.shown import response_object, usage
from agentserve.server.http.translate import api_error
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.sessions.transcript import write_json
from agentserve.server.sessions.turns import Started
from agentserve.server.text_port import JsonObject

log = logging.getLogger(__name__)


class Making:
    """From a plan and its turn to the events of the response. Its end is told once it is kept."""

    def __init__(self, context: ServerContext, plan: Plan, job: Job | None) -> None:
        """`job` None: it has failed before it could begin."""
        self.plan = plan
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
        self._upto = conversation.next if conversation is not None else 0

    def close(self) -> None:
        """Undo what was taken for it. Idempotent; a turn that has ended is not touched."""
        if not self._open:
            return
        self._open = False
        if self._job is not None:
            self._job.rollback()
        self.plan.claim.release()

    async def events(self, *, begun: bool = False) -> AsyncGenerator[list[JsonObject], None]:
        """The events as they come; a failure that comes before the first of them is raised.

        `begun`: some were told already.
        """
        fold, ids = self.fold, array("i")
        assert self._job is not None
        try:
            async with aclosing(self._context.runner.choices([self._job.specs])) as pieces:
                async for _, piece in pieces:
                    if isinstance(piece, Started):
                        yield fold.in_progress() if begun else fold.created() + fold.in_progress()
                        begun = True
                    elif isinstance(piece, Delta):
                        if piece and not self.plan.body.prewarm:
                            yield fold.delta(piece)
                    else:
                        self._committed = True
                        ids = self._job.prompt + array("i", piece.ids)
                        yield self._finished(piece)
        except Exception as error:
            told = api_error(error)
            if told is None and not begun:
                raise
            if told is None:
                log.exception("a response failed")
                told = ApiError("Internal error.", status=500, code="internal_error")
            if not begun:
                raise told from None
            self._fail(told)
        await self._keep_or_fail()
        if self.error is None and ids:
            compared = Compared(ids, len(self._job.prompt), facts_of(fold.response))
            self._desk.remember(self.plan.claim.tenant, fold.response["id"], compared)
        yield fold.ended()

    async def failed(self, error: ApiError) -> list[JsonObject]:
        """All events of a response that could not begin."""
        events = self.fold.created() + self.fold.in_progress()
        self._fail(error)
        await self._keep_or_fail()
        return events + self.fold.ended()

    async def cancelled(self) -> list[JsonObject]:
        """The last event of one that was stopped."""
        self.fold.cancel()
        await self._keep_or_fail()
        return self.fold.ended()

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
            tenant=plan.claim.tenant,
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
            and self._context.hooks.wants(plan.claim.tenant, f"response.{shown['status']}"),
        )

    def _finished(self, outcome: Outcome) -> list[JsonObject]:
        now = int(self._context.wall())
        if self.plan.body.prewarm:
            self.fold.prewarmed(usage(outcome.usage, generated=0), now)
            return []
        return self.fold.finish(outcome, now)

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
        earlier = self._desk.compared(self.plan.claim.tenant, id_)
        if earlier is not None:
            shown["prompt_cache_diagnostics"] = diagnosed(earlier, prompt, facts_of(shown))
        elif (kept := self._desk.shelf.get(id_)) is not None and kept.tenant == self.plan.claim.tenant:
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
    return lambda tokens: wire.chat_logprobs(tokens, context.tokenizer, most)["content"]
