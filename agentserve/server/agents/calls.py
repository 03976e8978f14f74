"""The tool calls of one turn: those under way, and results on their way to items."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from agentserve.server.agents.history import History
from agentserve.server.agents.means import Means
from agentserve.server.agents.ports import Line
from agentserve.server.agents.records import CallItem, Decision, Output, OutputItem, Turn
from agentserve.server.agents.runners import INTERRUPTED, ToolCall, ToolOutcome, ToolRunner
from agentserve.server.agents.texts import BROKE, DENIED, STARTED, TOO_LONG, UNDECIDED, timed_out
from agentserve.server.sessions.transcript import result_digest

log = logging.getLogger(__name__)

_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds between attempts to bring a result
MOST_OUTPUT_CHARS = 4 << 20  # of a tool that runs here; clients' are bounded as all bodies are


class Calls:
    """A result is the session's first (`Line.hold`), and an item then. Whoever brings one, by whichever way,
    the first is taken."""

    def __init__(
        self, means: Means, history: History, turn: Turn, line: Line, heard: Callable[[], None]
    ) -> None:
        """`heard` is called when a call that ran here has its result."""
        self._means = means
        self._history = history
        self._turn = turn
        self._line = line
        self._heard = heard
        self._outcomes: dict[str, ToolOutcome] = {}  # of calls whose results are held
        self._running: dict[str, asyncio.Task[None]] = {}
        said = history.approvals().values()  # before anything began here
        self._decisions: dict[str, asyncio.Event] = {}  # of calls whose user is waited for
        self._approved = {item.call for item in said if item.decision == "approve"}

    def outstanding(self) -> list[CallItem]:
        """Calls that are waited for and have no result, in call order."""
        held = self._line.held()
        return [call for call in self._history.open_calls(self._turn) if call.call not in held]

    def elsewhere(self) -> bool:
        """The session went on without the results of calls that are waited for."""
        names = {call.id for call in self._line.pending()}
        return any(call.call not in names for call in self.outstanding())

    def bring(self, results: Mapping[str, ToolOutcome]) -> None:
        """How results that are held came about."""
        self._outcomes.update(results)

    def forget(self, calls: Iterable[str]) -> None:
        for call in calls:
            self._outcomes.pop(call, None)

    def start(self) -> None:
        """Run what is waited for and does not run yet, and say by when all will be there."""
        waiting = self.outstanding()
        for call in waiting:
            if call.call not in self._running:
                self._running[call.call] = asyncio.create_task(self._run(call))
        ends = [call.deadline for call in waiting if call.deadline is not None]
        if waiting and len(ends) == len(waiting):
            self._line.expect(max(0.0, max(ends) - self._means.now()))

    def stop(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._running.clear()

    def take_in(self) -> Future[None] | None:
        """Make items of the results that are held. When they are on disk, where that has to be waited for:
        else the session has them."""
        held, kept = self._line.held(), None
        for call in self._history.open_calls(self._turn):
            if call.call in held:
                task = self._running.pop(call.call, None)
                if task is not None:
                    task.cancel()
                outcome = self._outcomes.pop(call.call, None) or _read(held[call.call])
                kept = self._answered(call, outcome)
                self.settled([call])
        return kept if self._line.forgotten else None

    def settled(self, calls: Iterable[CallItem]) -> None:
        """Nobody is to run these any more."""
        for call in calls:
            runner = self._means.runners.get(call.kind)
            if runner is not None:
                runner.settled(self._tool_call(call))

    async def acknowledge(self, items: Iterable[object]) -> None:
        """Calls that nobody waits for have a result at once: that they run."""
        held = self._line.held()
        calls = [item for item in items if isinstance(item, CallItem) and item.background and item.whole]
        fresh: dict[str, Output] = {call.call: STARTED for call in calls if call.call not in held}
        if fresh:
            await self._line.hold(fresh)

    async def recover(self) -> None:
        """After a restart: what was taken is an item, and what cannot have gone on has failed."""
        held = self._line.held()
        lost = {call.id for call in self._line.pending() if call.id not in held}
        known = [output for output in self._history.outputs().values() if output.call in lost]
        for output in known:  # both disks were written, and one of them was damaged
            await self._line.hold({output.call: ToolOutcome(output.output or "", output.error).content})
        self.take_in()
        for call in self.outstanding():
            runner = self._means.runners.get(call.kind)
            if (
                runner is not None
                and not runner.lasting
                and (not call.approval or call.call in self._approved)
            ):
                outcome = ToolOutcome(error=INTERRUPTED)
                await self._line.hold({call.call: outcome.content})
                self._outcomes[call.call] = outcome
        self.take_in()

    def decided(self, call: CallItem) -> None:
        """A user's word on it is in the history."""
        if call.call in self._decisions:
            self._decisions[call.call].set()

    async def _decision(self, call: CallItem) -> Decision | None:
        """What its user says to it; None: nothing, for as long as the server waits for tools."""
        said = self._history.approvals().get(call.call)
        if said is None:
            decided = self._decisions[call.call] = asyncio.Event()
            waits: list[asyncio.Future[object]] = [
                asyncio.ensure_future(decided.wait()),
                asyncio.ensure_future(self._means.sleep(self._means.most_wait)),
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                del self._decisions[call.call]
                for wait in waits:
                    wait.cancel()
            said = self._history.approvals().get(call.call)
        return None if said is None else said.decision

    def deadline(self, name: str) -> float | None:
        """Of a call that is made now."""
        tool = self._history.config.tool(name)
        return None if tool is None or tool.timeout is None else self._means.now() + tool.timeout

    async def _run(self, call: CallItem) -> None:
        """One call, from its start to its result in the session."""
        runner = self._means.runners.get(call.kind)
        said = await self._decision(call) if call.approval else "approve"
        if said != "approve":
            wait = self._means.most_wait
            outcome = ToolOutcome(error=DENIED if said else UNDECIDED.format(wait))
        elif runner is None:
            outcome = ToolOutcome(error=f"This server cannot run tools of kind {call.kind!r}.")
        else:
            outcome = await self._in_time(runner, call)
        await self._bring(call, outcome)
        self._heard()

    async def _bring(self, call: CallItem, outcome: ToolOutcome) -> None:
        """Until the session has a result of the call, this one or another: nobody else has this one. A disk
        that does not take it is waited for."""
        pause = _PAUSE
        while self._awaited(call):
            try:
                await self._line.hold({call.call: outcome.content})
                self._outcomes.setdefault(call.call, outcome)
            except Exception as error:
                if self._line.explain(error) is None:
                    log.exception("the result of a tool could not be taken")
                    return
                await self._means.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _awaited(self, call: CallItem) -> bool:
        """The session waits for it, and has no result."""
        pending = (waiting.id for waiting in self._line.pending())
        return call.call in pending and call.call not in self._line.held()

    async def _in_time(self, runner: ToolRunner, call: CallItem) -> ToolOutcome:
        tool = self._history.config.tool(call.name)
        timeout = (tool.timeout if tool is not None else None) or self._means.most_wait
        left = timeout if call.deadline is None else max(0.0, call.deadline - self._means.now())
        work = asyncio.ensure_future(runner.run(self._tool_call(call)))
        timer = asyncio.ensure_future(self._means.sleep(left))
        try:
            await asyncio.wait({work, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return ToolOutcome(error=timed_out(timeout))
            return ToolOutcome(error=BROKE) if work.cancelled() else bounded(work.result())
        except Exception:
            log.exception("the runner of %s tools failed", call.kind)
            return ToolOutcome(error=BROKE)
        finally:
            work.cancel()
            timer.cancel()
            await asyncio.gather(work, timer, return_exceptions=True)

    def _tool_call(self, call: CallItem) -> ToolCall:
        history, turn = self._history, self._turn
        server = history.head.config.server(call.server) if call.server else None
        return ToolCall(history.id, turn.id, call, history.head.tenant, turn.number, server)

    def _answered(self, call: CallItem, outcome: ToolOutcome) -> Future[None] | None:
        output = None if outcome.error is not None else outcome.output
        name = self._history.output_id(self._turn.id, call.call)
        item = OutputItem(name, call.call, output, outcome.error)
        kept = self._means.shelf.add(self._history, self._turn, item)
        self._means.teller.added(self._history, self._turn, item)
        self._means.teller.call_done(self._history, self._turn, call.call)
        return kept


def bounded(outcome: ToolOutcome) -> ToolOutcome:
    """Of a tool that runs here: not too large, and text that can be sent and kept (half a surrogate pair
    cannot)."""
    content = outcome.content
    size = len(content) if isinstance(content, str) else sum(len(str(part)) for part in content)
    if size > MOST_OUTPUT_CHARS:
        return ToolOutcome(error=TOO_LONG)
    output, error = outcome.output, outcome.error
    outcome = ToolOutcome(_whole(output) if isinstance(output, str) else output, error and _whole(error))
    try:
        result_digest(outcome.content)
    except ValueError as wrong:  # parts that are none
        log.warning("a tool returned what no model can read: %s", type(wrong).__name__)
        return ToolOutcome(error=BROKE)
    return outcome


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _read(content: Output) -> ToolOutcome:
    """A result that came another way."""
    if isinstance(content, str) and content.startswith("Error: "):
        return ToolOutcome(error=content.removeprefix("Error: "))
    return ToolOutcome(content)
