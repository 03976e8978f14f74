"""Sessions that wait for a tool whose output is told ahead, and what a core computes of it."""

from __future__ import annotations

from array import array

from agentserve.core.plan import Plan
from agentserve.messages import Park, ToolSignal, pack_tokens
from agentserve.types import SessionId, TurnId
from tests.engines import Rig, cold
from tiering.policy.base import Signal

MORE = list(range(500, 540))


def waiting(rig: Rig, name: str, prompt: list[int], count: int = 2) -> list[int]:
    """A session whose turn has ended in a tool call: its context."""
    turn = rig.submit(name, prompt, max_tokens=count)
    rig.drain()
    rig.core.handle(Park(SessionId(name), turn, waiting_tool=True), rig.now)
    rig._collect()
    return prompt + rig.output(name, turn)


def tell(rig: Rig, name: str, tokens: list[int], turn: int = 1) -> None:
    packed = pack_tokens(array("i", tokens))
    rig.core.handle(ToolSignal(SessionId(name), TurnId(turn), Signal.STREAMING, packed), rig.now)
    rig._collect()


def quiet(rig: Rig, most: int = 100) -> list[Plan]:
    """Steps until there is nothing to compute any more: their plans."""
    plans = []
    for _ in range(most):
        plan = rig.step()
        if plan is None:
            return plans
        plans.append(plan)
    raise AssertionError("it goes on for ever")


def chunks(plans: list[Plan], name: str) -> list[tuple[int, int]]:
    return [
        (chunk.start, len(chunk.tokens)) for plan in plans for chunk in plan.chunks if chunk.session == name
    ]


def take(rig: Rig, name: str, prompt: list[int], turn: int = 2, count: int = 3) -> int:
    """The next turn: it says what a cold one would. Returns the prompt tokens that it computed."""
    rig.submit(name, prompt, max_tokens=count)
    before = len(rig.plans)
    rig.drain()
    assert rig.output(name, turn) == cold(prompt, count)
    usage = rig.ended(name, turn).usage
    rows = sum(length for _, length in chunks(rig.plans[before:], name))
    assert (usage.computed, usage.prompt - usage.cached) == (rows, rows - count + 1)
    return usage.prompt - usage.cached
