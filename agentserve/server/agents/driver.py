"""The loop of one turn: a model call, its tools, the next model call, to the answer.

One task per turn. What it has done is in the history before anybody is told of it, so a turn that was cut
off by the end of the process goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import msgspec

from agentserve.server.agents.calls import Calls
from agentserve.server.agents.fold import Fold, items_of_message
from agentserve.server.agents.history import History
from agentserve.server.agents.means import Means
from agentserve.server.agents.ports import Generation, Line, NotYet
from agentserve.server.agents.records import (
    ApprovalItem,
    CallItem,
    Decision,
    Failure,
    Turn,
    TurnStatus,
    Usage,
)
from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.agents.texts import (
    ELSEWHERE,
    TOO_LONG,
    TOO_MANY,
    late_result,
    user_message,
)
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.text_port import JsonObject

log = logging.getLogger(__name__)

CANCELLED = "cancelled by its client"


@dataclass(eq=False, slots=True)
class Post:
    """Results that a client waits to be told of: with them the next model call begins, or not."""

    before: object  # for `Line.give_back`
    calls: tuple[str, ...]
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Driver:
    def __init__(self, means: Means, history: History, turn: Turn, line: Line) -> None:
        self.history = history
        self.turn = turn
        self.line = line
        self._means = means
        self._changed = asyncio.Event()
        self._calls = Calls(means, history, turn, line, self._changed.set)
        self._posts: list[Post] = []
        self._told: tuple[str, ...] = ()  # background results that the model call under way brings
        self._cancelled = False
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    # --- from outside ------------------------------------------------------------------

    def start(self, first: Generation | None) -> asyncio.Task[None]:
        """`first`: leased already; None: the turn goes on after the end of an earlier process."""
        self._task = asyncio.create_task(self._run(first))
        if first is not None:
            self._task.add_done_callback(lambda _: first.rollback())  # where it never got to run
        return self._task

    async def cancel(self) -> None:
        """End the turn. Returns when it is over."""
        task = self._task
        if task is None:
            return
        if not (self._cancelled or self._ending):
            self._cancelled = True
            task.cancel(CANCELLED)
        await asyncio.wait({task})
        if not self.turn.over:  # it never got to run
            await self._end("cancelled", None)

    async def stop(self) -> None:
        """The server leaves: what is kept says that the turn ran."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def prepare(self, messages: list[JsonObject]) -> Generation:
        """The turn's first model call, leased. What it raises the line explains."""
        return await self._begin(messages)

    def heard(self) -> None:
        """Something about its calls has changed."""
        self._changed.set()

    async def take(self, results: Mapping[str, ToolOutcome]) -> None:
        """Take results from outside, all or none. With the last one the next model call begins before
        this returns, or it raises why it cannot, and then they are not taken."""
        before = await self.line.hold({call: outcome.content for call, outcome in results.items()})
        mine = {call.call for call in self.history.open_calls(self.turn)} & results.keys()
        self._calls.bring({call: results[call] for call in mine})
        if mine and not self._calls.outstanding():  # else it went on with them while they were written
            post = Post(before, tuple(mine))
            self._posts.append(post)
            self.heard()
            await asyncio.shield(post.done)
        else:
            kept = self._calls.take_in()
            self.heard()
            await booked(kept)

    async def decide(self, call: CallItem, decision: Decision) -> None:
        """What a user says to a call that needs approval."""
        item = ApprovalItem(self._means.new_id("apr"), call.call, decision)
        kept = self._means.shelf.add(self.history, self.turn, item)
        try:
            await booked(kept)
        finally:
            self._calls.decided(call)
            self.heard()

    # --- the loop ----------------------------------------------------------------------

    async def _run(self, generation: Generation | None) -> None:
        failure: Failure | None = None
        try:
            if generation is None:
                await self._recover()
            else:
                await self._generate(generation)
            while not self._over():
                waited = await self._results()
                generation = await self._begin()
                try:
                    await booked(self._calls.take_in())
                except BaseException:
                    generation.rollback()
                    raise
                self._released()
                if waited:
                    self._means.teller.in_progress(self.history, self.turn, again=True)
                await self._generate(generation)
            failure = self.history.fails(self.turn)
            await self._end("failed" if failure else "completed", failure)
        except asyncio.CancelledError:
            self._calls.stop()
            if not self._cancelled:
                raise
            await self._end("cancelled", None)
        except Exception as error:
            self._calls.stop()
            failure = self._explain(error)
            await self._end("failed", failure)
        finally:
            self._calls.stop()
            self._released()

    def _over(self) -> bool:
        history = self.history
        answered = history.answered(self.turn) or history.fails(self.turn) is not None
        return answered and not history.untold()

    async def _begin(self, messages: list[JsonObject] | None = None) -> Generation:
        """The next model call, leased."""
        if self.turn.steps >= self._means.most_steps:
            raise _Failed(Failure("invalid_request", TOO_MANY.format(self._means.most_steps)))
        first = messages is not None
        told = list(messages or [])
        late = self.history.untold()
        told += [late_result(call, output) for call, output in late]
        while True:
            try:
                generation = await self.line.begin(self.history.config, told, first=first)
                self._told = tuple(call.call for call, _ in late)
                return generation
            except NotYet:
                if not self._calls.outstanding():
                    raise _Failed(Failure("invalid_request", ELSEWHERE)) from None
                await self._results()
            except Exception as error:
                known = self.line.explain(error)
                if known is None or not known.too_long or not await self._shorten(error):
                    raise

    async def _shorten(self, error: Exception) -> bool:
        """The results do not fit. Whether to try again without the largest: whoever just brought it has it
        back, and of one that was taken before the model reads that it was too long."""
        held = self.line.held()
        sizes = {call: len(str(content)) for call, content in held.items()}
        largest = max(sizes, key=lambda call: sizes[call], default=None)
        brought = {call for post in self._posts for call in post.calls}
        if largest in brought or (brought and sizes[largest or ""] <= len(TOO_LONG)):
            self._give_back(error)
            await self._results()
            return True
        if largest is None or sizes[largest] <= 2 * len(TOO_LONG):
            return False
        outcome = ToolOutcome(error=TOO_LONG)
        self.line.replace(largest, outcome.content)
        self._calls.bring({largest: outcome})
        return True

    def _give_back(self, error: Exception) -> None:
        posts, self._posts = self._posts, []
        for post in reversed(posts):
            self.line.give_back(post.before)
            self._calls.forget(post.calls)
            if not post.done.done():
                post.done.set_exception(error)

    async def _generate(self, generation: Generation) -> None:
        """One model call, from its lease to what it leaves in the history."""
        history, turn, means = self.history, self.turn, self._means
        names = history.namer(turn)
        fold = Fold(history.config, names, history.said_by(turn.id), self._calls.deadline)
        told, self._told = self._told, ()
        turn.steps += 1
        finished = False
        try:
            async with aclosing(generation.pieces()) as pieces:
                async for _, piece in pieces:
                    if isinstance(piece, Delta):
                        means.teller.steps(history, turn, fold.delta(piece))
                    elif isinstance(piece, Outcome):
                        finished = True
                        await self._said(fold, piece, generation.number, told)
        finally:
            generation.rollback()
            if not finished:
                means.teller.steps(history, turn, fold.broken())

    async def _said(self, fold: Fold, outcome: Outcome, number: int, told: tuple[str, ...]) -> None:
        usage = outcome.usage
        more = Usage(usage.prompt, usage.cached, usage.generated, outcome.reasoning_tokens)
        turn = self.turn
        turn.usage = more if turn.usage is None else turn.usage.plus(more)
        steps, items = fold.finish(outcome)
        # The session's turn is committed: whatever happens now, a start finds the same items again.
        kept = self._means.shelf.add(self.history, turn, *items, step=number, told=told)
        self._means.shelf.keep_turn(self.history, turn)
        try:
            await booked(kept)
        finally:
            self._means.teller.steps(self.history, turn, steps)
        await self._calls.acknowledge(items)

    # --- tools -------------------------------------------------------------------------

    async def _results(self) -> bool:
        """Until every call that is waited for has its result. Whether the client was waited for."""
        history, turn = self.history, self.turn
        self._calls.start()
        told: set[str] = set()
        while True:
            self._changed.clear()
            waiting = self._calls.outstanding()
            if not waiting:
                break
            if self._calls.elsewhere():
                raise _Failed(Failure("invalid_request", ELSEWHERE))
            self._calls.take_in()
            required = {call.call for call in waiting if history.awaits_client(call)}
            status = "waiting" if required else "in_progress"
            if status != turn.status:
                turn.status = "waiting" if required else "in_progress"
                await booked(self._means.shelf.keep_turn(history, turn))
            if required - told:
                told |= required
                self._means.teller.requires_action(history)
            await self._changed.wait()
        if turn.status == "waiting":
            turn.status = "in_progress"
            self._means.shelf.keep_turn(history, turn)
        return bool(told)

    def _released(self) -> None:
        """Whoever waits for the next model call need not any more."""
        posts, self._posts = self._posts, []
        for post in posts:
            if not post.done.done():
                post.done.set_result(None)

    # --- the ends ----------------------------------------------------------------------

    async def _end(self, status: TurnStatus, failure: Failure | None) -> None:
        self._ending = True
        history, turn, means = self.history, self.turn, self._means
        if status != "completed":
            self._calls.take_in()  # what is there is not lost
            self.line.stop_waiting(f"the turn was {status}" if failure is None else failure.message)
        now = means.wall()
        ended = msgspec.structs.replace(turn, status=status, error=failure, completed=now)
        happened = [(kind, turn.number) for kind in (("failed", "idle") if status == "failed" else ("idle",))]
        means.shelf.owe(history, [event for event in happened if means.teller.wants(history, event)])
        kept = means.shelf.keep_turn(history, ended)
        history.head.active = now
        means.shelf.keep_head(history)
        try:
            await booked(kept)
        except StorageFailed as error:  # it is written when the disk is back
            log.warning("the end of a turn waits for the disk: %s", error)
        left = history.open_calls(turn)
        turn.status, turn.error, turn.completed = status, failure, now
        self._calls.settled(left)
        for call in left:
            means.teller.call_done(history, turn, call.call)
        means.teller.ended(history, turn)

    def _explain(self, error: Exception) -> Failure:
        if isinstance(error, _Failed):
            return error.failure
        known = self.line.explain(error)
        if known is None:
            log.exception("the turn of an agent failed", exc_info=error)
            known = Failure("internal_error", "Internal error.")
        return known

    # --- after a restart ---------------------------------------------------------------

    async def _recover(self) -> None:
        """Bring the history to where its session is, and begin what was not begun."""
        history, turn, means = self.history, self.turn, self._means
        reply = self.line.committed_reply()
        seen = max([turn.base, *(batch.step or 0 for batch in history.batches if batch.turn == turn.id)])
        if reply is not None and reply[0] > seen:  # committed, and then the server died
            number, message, whole = reply
            names = history.namer(turn)
            items = items_of_message(history.config, message, names, self._calls.deadline, whole=whole)
            turn.steps += 1
            await booked(means.shelf.add(history, turn, *items, step=number))
        turn.lives += 1
        with suppress(StorageFailed):  # it is written when the disk is back
            await booked(means.shelf.keep_turn(history, turn))
        last = history.last_reply(turn)
        if last is None:
            asked = [user_message(item) for item in history.asked(turn)]
            await self._generate(await self._begin(asked))
            return
        await self._calls.acknowledge(last.items)
        await self._calls.recover()


class _Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
