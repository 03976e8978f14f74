"""Who runs a tool call, and what comes of it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from agentserve.server.agents.records import CallItem, McpServer, Output
from agentserve.tools import BadArguments, Tool

log = logging.getLogger(__name__)

INTERRUPTED = "The tool was interrupted: the server was started again while it ran."
FAILED = "The tool failed."
MOST_THREADS = 16  # plain functions at once
LEAVING = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""A function that raises one of these must not end the server. Signals are the server's own to handle."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    session: str  # public id
    turn: str
    item: CallItem
    owner: str = ""  # the session's tenant
    number: int = 0  # of the turn
    server: McpServer | None = None  # of an MCP tool

    @property
    def id(self) -> str:
        return self.item.call

    @property
    def name(self) -> str:
        return self.item.name


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What a call came to: its output, or an error that the model reads."""

    output: Output = ""
    error: str | None = None

    @property
    def content(self) -> Output:
        """As a tool message."""
        if self.error is None:
            return self.output
        return self.error if self.error.startswith("Error") else f"Error: {self.error}"


class ToolRunner(Protocol):
    """Runs calls of one kind of tool."""

    @property
    def lasting(self) -> bool:
        """A call that was under way when the server died is still under way: `run` takes it up again."""
        ...

    async def run(self, call: ToolCall) -> ToolOutcome:
        """The call's outcome. Cancelled when nobody waits for it any more: its time is over, its turn was
        cancelled, or a result came another way. What it raises the model reads as a failure, without its
        text."""
        ...

    def settled(self, call: ToolCall) -> None:
        """The call has its result in the session, whoever brought it, or its turn ended without one."""
        ...


class ClientTools:
    """Calls that the client runs: the result comes from outside, and `run` is cancelled then."""

    lasting = True

    async def run(self, call: ToolCall) -> ToolOutcome:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody ends it")

    def settled(self, call: ToolCall) -> None:
        """Nothing is owed."""


class PythonTools:
    """Functions registered in this process."""

    lasting = False  # it may have had its effect

    def __init__(self, tools: Mapping[str, Tool], threads: int = MOST_THREADS) -> None:
        self.tools = dict(tools)
        self._places = asyncio.Semaphore(threads)

    def settled(self, call: ToolCall) -> None:
        """Nothing is owed."""

    async def run(self, call: ToolCall) -> ToolOutcome:
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolOutcome(error=f"This server has no tool {call.name!r} any more.")
        try:
            made = tool.bound(json.loads(call.item.arguments or "{}"))
        except (BadArguments, ValueError, RecursionError) as error:
            return ToolOutcome(error=f"Bad arguments. {error}"[:1000])
        try:
            if tool.is_async:
                value = await made()
            else:
                value = await self._in_thread(made)
            return ToolOutcome(_text(value))
        except (Exception, *LEAVING) as error:
            log.warning("tool %s failed: %s: %s", call.name, type(error).__name__, error)
            return ToolOutcome(error=f"{FAILED[:-1]}: {type(error).__name__}: {error}"[:1000])

    async def _in_thread(self, made: Callable[[], object]) -> object:
        """A thread of its own, that does not keep the process from ending. Its place is free when it has
        ended, whether or not somebody still waits for what it says."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        said: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

        def over(value: object, error: BaseException | None) -> None:
            self._places.release()
            if not said.done():
                said.set_result((value, error))

        def work() -> None:
            value: object = None
            failure: BaseException | None = None
            try:
                value = made()
            except BaseException as error:
                failure = error
            with suppress(RuntimeError):  # the server has left
                loop.call_soon_threadsafe(over, value, failure)

        threading.Thread(target=work, name="tool", daemon=True).start()
        value, error = await said
        if error is not None:
            raise error
        return value


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
