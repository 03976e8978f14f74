"""A response that calls tools of MCP servers takes several model calls: what lies between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from msgspec.structs import replace

from agentserve.server.agents.calls import bounded
from agentserve.server.agents.means import MOST_STEPS
from agentserve.server.agents.records import CallItem
from agentserve.server.agents.runners import FAILED, ToolCall, ToolOutcome
from agentserve.server.agents.texts import TOO_LONG, TOO_MANY
from agentserve.server.errors import ApiError
from agentserve.server.http.context import ServerContext
from agentserve.server.http.promised import patient
from agentserve.server.http.responses import job as jobs
from agentserve.server.http.responses.job import Job
from agentserve.server.http.responses.mcp_items import error_object
from agentserve.server.http.responses.plan import Plan, messages_for
from agentserve.server.http.responses.thoughts import Room
from agentserve.server.http.responses.tools import unforced
from agentserve.server.http.schemas import ChatRequest
from agentserve.server.sessions.advice import settle
from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.text_port import JsonObject
from tiering.policy.base import Departure

log = logging.getLogger(__name__)

MOST_CALLS = 128  # of one response, where its request says nothing
MOST_AT_ONCE = 8  # of them
ONCE = "The call was made for this approval before, and is not made again; its result is not known here."
NOT_KEPT = "The call was not made: the disk did not take that its approval is spent."
NO_MORE = "The call was not made: this response may make {} tool calls."


class Rounds:
    """`lease` takes the session's next turn, for a chat request."""

    def __init__(
        self, context: ServerContext, plan: Plan, lease: Callable[[ChatRequest], Awaitable[Job]]
    ) -> None:
        self._context = context
        self._plan = plan
        self._lease = lease
        self._steps = 0
        self._made = 0  # tool calls
        most = plan.body.max_tool_calls
        self._most = MOST_CALLS if most is None else most
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self, items: Sequence[JsonObject]) -> list[ToolOutcome]:
        """Make calls, side by side; those of which there may be no more are refused."""
        room = max(0, self._most - self._made)
        self._made += len(items)
        refused = [ToolOutcome(error=NO_MORE.format(self._most))] * len(items[room:])
        return [*await asyncio.gather(*map(self._run, items[:room])), *refused]

    async def next(
        self, output: list[JsonObject], fresh: Collection[str], session: str | None, generated: int
    ) -> Job:
        """The session's next turn, on what the response has come to: `fresh` calls have just been made,
        `generated` tokens said.

        Results that do not fit lose the largest of them, and the model reads so. ApiError.
        """
        self._steps += 1
        if self._steps >= MOST_STEPS:
            raise ApiError(TOO_MANY.format(MOST_STEPS), code="too_many_model_calls")
        while True:
            try:
                return await self._lease(await self._request(output, session, generated))
            except ApiError as error:
                if error.code != jobs.TOO_LONG or not _shorten(output, fresh):
                    raise self._plan.told(error) from None

    def left(self, generated: int) -> int | None:
        """Tokens that may still be generated; None: as many as there is room for."""
        most = self._plan.body.max_output_tokens
        return None if most is None else most - generated

    def let_go(self, session: str | None) -> None:
        """Nobody brings the results that the session waits for: its response came to an end before."""
        context = self._context
        found = None if session is None else context.directory.get(self._plan.hold.tenant, session)
        if found is not None and found.running is None:
            reason = "its response ended before its tools did"
            context.directory.release(found, context.clock.now(), reason, Departure.ABANDONED)
            settle(context.directory, context.engine, context.chronicle)

    async def _request(self, output: list[JsonObject], session: str | None, generated: int) -> ChatRequest:
        context, plan = self._context, self._plan
        room = Room(context.options.limits.expanded_bytes)
        places = [*plan.places, *(["output"] * len(output))]
        runs = [*plan.earlier, plan.items, output]
        messages, plan.where = await messages_for(context, plan.box, plan.body, runs, places, room=room)
        fields = plan.fields
        choice = unforced(fields.tool_choice) if generated else fields.tool_choice
        if self._made >= self._most:
            choice = "none" if fields.tools else choice
        return replace(
            fields,
            messages=messages,
            tool_choice=choice,
            session_id=session or fields.session_id,
            max_completion_tokens=self.left(generated),
            slo=patient(fields.slo),
        )

    async def _run(self, item: JsonObject) -> ToolOutcome:
        box, label, name = self._plan.box, item["server_label"], item["name"]
        shown = box.remote_names.get((label, name))
        if shown is None:
            return ToolOutcome(error=f"There is no tool {name[:80]!r} of {label[:64]!r} any more.")
        call = CallItem(item["id"], item["id"], shown, item["arguments"], "mcp", server=label, remote=name)
        owner, server = self._plan.hold.tenant, box.remote[shown].server
        try:
            remote = self._context.agents.means.mcp
            async with self._places:
                if item["approval_request_id"] and not await self._context.responses.spent.take(owner, item):
                    return ToolOutcome(error=ONCE)
                return bounded(await remote.run(ToolCall("", "", call, owner=owner, server=server)))
        except StorageFailed:
            return ToolOutcome(error=NOT_KEPT)
        except Exception:
            log.exception("an MCP call of a response failed")
            return ToolOutcome(error=FAILED)


def _shorten(output: list[JsonObject], fresh: Collection[str]) -> bool:
    """Replace the largest result by the word that it is too long. Whether there was one."""
    sizes = {i: len(item["output"] or "") for i, item in enumerate(output) if item["id"] in fresh}
    largest = max(sizes, key=lambda index: sizes[index], default=None)
    if largest is None or sizes[largest] <= 2 * len(TOO_LONG):
        return False
    item = output[largest]
    output[largest] = {**item, "status": "failed", "output": None, "error": error_object(TOO_LONG)}
    return True
