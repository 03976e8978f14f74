"""Which tools there are for a session, and a call put together with its function. Calls nothing. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec

from agentserve.client.protocol.calls import Outcome
from agentserve.client.protocol.events import Call, SessionInfo
from agentserve.client.protocol.flow import JsonObject
from agentserve.tools import BadArguments, Tool

GRACE = 10.0  # seconds that the server waits longer than the client lets a tool run
MOST_ERROR = 1000  # characters


class Kind(Enum):
    PLAIN = auto()
    COROUTINE = auto()
    PIECES = auto()  # a generator: its output is sent while it is produced
    ASYNC_PIECES = auto()


@dataclass(frozen=True, slots=True)
class Job:
    """A call, ready to be made. `make()` is a value, a coroutine or a generator, by its kind."""

    make: Callable[[], Any]
    kind: Kind
    timeout: float


class Toolbox:
    """Tools that the client runs, and descriptions of others, which are passed on as they are: their calls
    are somebody else's to answer."""

    def __init__(self, tools: Iterable[Tool | JsonObject] = ()) -> None:
        self._all = list(tools)
        self._others: set[object] = set()
        self._own = {tool.name: tool for tool in self._all if isinstance(tool, Tool)}
        for tool in self._all:
            if not isinstance(tool, Tool | dict):
                raise TypeError(f"{tool!r}: a tool is made by @tool, or a JSON object")
        if len(self._own) != sum(isinstance(tool, Tool) for tool in self._all):
            raise ValueError("two tools have one name")

    @property
    def background(self) -> frozenset[str]:
        """Names of tools that the agent does not wait for."""
        return frozenset(name for name, tool in self._own.items() if tool.background)

    def described(self) -> list[JsonObject]:
        """As an agent's `tools`."""
        return [_described(tool) if isinstance(tool, Tool) else tool for tool in self._all]

    def of(self, session: SessionInfo) -> Toolbox:
        """For a session: with the names of those of its tools that are not run here."""
        described = session.raw.get("agent", {}).get("tools") or ()
        self._others |= {tool.get("name") for tool in described} - self._own.keys()
        return self

    def job(self, call: Call) -> Job | Outcome | None:
        """An Outcome where the call cannot be made: an error that the model reads. None: it is not ours."""
        tool = self._own.get(call.name)
        if tool is None:
            if call.name in self._others:
                return None
            return Outcome(error=f"There is no tool {call.name[:80]!r}.")
        try:
            make = tool.bound(call.arguments)
        except BadArguments as error:
            return Outcome(error=f"Bad arguments. {error}"[:MOST_ERROR])
        return Job(make, _kind(tool.function), tool.timeout)


def came_to(value: object) -> Outcome:
    """What a tool returned, as the model reads it: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return Outcome(value)
    try:
        return Outcome(msgspec.json.encode(value).decode())
    except (TypeError, ValueError, RecursionError) as error:
        return failed(error)


def failed(error: BaseException) -> Outcome:
    return Outcome(error=f"The tool failed: {type(error).__name__}: {error}"[:MOST_ERROR])


def too_late(timeout: float) -> Outcome:
    return Outcome(error=f"The tool took longer than {timeout:g} s.")


def piece_of(value: object) -> str:
    """A piece of a streamed result. TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"a tool that is a generator yields text, got {type(value).__name__}")
    return value


def _described(tool: Tool) -> JsonObject:
    described: JsonObject = {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "timeout": tool.timeout + GRACE,
    }
    return described | ({"async": True} if tool.background else {})


def _kind(function: Callable[..., Any]) -> Kind:
    if inspect.isasyncgenfunction(function):
        return Kind.ASYNC_PIECES
    if inspect.isgeneratorfunction(function):
        return Kind.PIECES
    return Kind.COROUTINE if inspect.iscoroutinefunction(function) else Kind.PLAIN
