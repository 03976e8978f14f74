"""Whole turns of a core with tiers, and a policy that decides by a table."""

from __future__ import annotations

import math
from collections.abc import Callable

from agentserve.messages import Describe, Description, SessionView, ToolSignal
from agentserve.sim.mover import Faults
from agentserve.types import SessionId, TurnId
from tests.engines import TierRig, cold
from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Residency, Signal
from tiering.policy.base import Park as Parked
from tiering.types import Move, Tier

SLOW = Faults(late=1.0, slower=1e9)  # every transfer is as good as dead


class Scripted:
    """Decides by a table of sessions, and remembers what it was told."""

    name = "scripted"
    eager = False

    def __init__(self, choices: dict[str, Choice] | None = None, until: float = math.inf) -> None:
        self.choices = choices or {}
        self.worths: dict[str, float] = {}
        self.until = until
        self.parks: list[Parked] = []
        self.told: list[tuple[object, ...]] = []
        self.asked: list[tuple[str, Residency, Market]] = []
        self.place: Callable[[str], float] | None = None

    def parked(self, park: Parked) -> None:
        self.parks.append(park)

    def resumed(self, session: str, at: float, waited: float) -> None:
        self.told.append(("resumed", session, round(waited, 6)))

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        self.told.append(("signalled", session, signal, hints.expected_wait))

    def gone(self, session: str, at: float, why: Departure) -> None:
        self.told.append(("gone", session, why))

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        self.asked.append((session, residency, market))
        return Decision(self.choices.get(session, Choice.HOLD), market.now + self.until, "by the table", 0.5)

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        return self.worths.get(session, 1.0)

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (self.place(session) if self.place else arrived,)


def turn(rig: TierRig, name: str, tokens: list[int], count: int = 1) -> list[int]:
    """One whole turn, then everything settles. Returns the context after it."""
    number = rig.submit(name, tokens, max_tokens=count)
    rig.drain()
    rig.settle()
    said = rig.output(name, number)
    assert said == cold(tokens, count)
    return tokens + said


def view(rig: TierRig, name: str) -> SessionView:
    rig.core.handle(Describe(1, SessionId(name)), rig.now)
    (event,) = [event for event in rig.core.take_events() if isinstance(event, Description)]
    assert event.session is not None
    return event.session


def residency(rig: TierRig, name: str) -> Residency:
    found = view(rig, name).residency
    assert found is not None
    return found


def orders(rig: TierRig, move: Move) -> int:
    return sum(len(order.blocks) for order in rig.orders if order.move is move)


def namespace(rig: TierRig, name: str) -> bytes:
    session = rig.core.sessions.get(SessionId(name))
    assert session is not None
    return session.namespace


def signal(rig: TierRig, name: str, number: int = 1) -> None:
    rig.core.handle(ToolSignal(SessionId(name), TurnId(number), Signal.CONNECTED), rig.now)
