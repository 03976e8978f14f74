"""What all turns of agents share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from agentserve.server.agents.fold import NewId
from agentserve.server.agents.ports import Teller
from agentserve.server.agents.remote import McpTools
from agentserve.server.agents.runners import ToolRunner
from agentserve.server.agents.shelf import Shelf

MOST_STEPS = 128  # model calls of a turn
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Means:
    shelf: Shelf
    teller: Teller
    runners: Mapping[str, ToolRunner]  # by kind of tool
    wall: Callable[[], float]  # Unix time
    now: Callable[[], float]  # the same, but that nobody sets it: deadlines are told by it
    sleep: Sleep  # seconds
    new_id: NewId
    mcp: McpTools  # lists what its servers have
    most_wait: float  # seconds that a call may take where its tool says nothing
    most_steps: int = MOST_STEPS
