"""Orders of orders: whose turns are next, and within a tenant as that order says."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from agentserve.core.line import by_priority
from agentserve.core.scheduling.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, DeficitRoundRobin, VirtualTokens
from agentserve.core.scheduling.policy import Order, Outlook, Ran
from agentserve.core.session import Session
from agentserve.types import SessionId

MOVED_EACH = 8  # a tenant that moves in a list takes as long as so many of one that is sorted anew
MOST_IDLE = 10_000  # tenants with nothing in line whose past is remembered


class Lined(Order, Protocol):
    """An order that knows how many wait in it."""

    def __len__(self) -> int: ...


class OwnPlaces(Order):
    """An order that knows neither tenants nor priorities: in the places that it gives to a tenant's turns,
    the more urgent of these go first. So no word of a tenant moves another's turns."""

    def __init__(self, inner: Order) -> None:
        self._inner = inner
        self._loud: set[SessionId] = set()  # turns in line that have a priority

    def entered(self, session: Session, now: float) -> None:
        self._inner.entered(session, now)
        if session.running_turn.rank[0]:
            self._loud.add(session.id)

    def left(self, session: Session, now: float) -> None:
        self._inner.left(session, now)
        self._loud.discard(session.id)

    def line(self, now: float) -> Iterator[Session]:
        line = self._inner.line(now)
        return iter(by_priority(list(line))) if self._loud else line

    def standing(self, running: Sequence[Session], now: float) -> Sequence[Session]:
        return by_priority(self._inner.standing(running, now))

    def outranks(self, waiting: Session, running: Session) -> bool:
        return self._inner.outranks(waiting, running)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        self._inner.stepped(ran, seconds, now)

    def ended(self, session: Session, now: float) -> None:
        self._inner.ended(session, now)


class FairShares(Order):
    """The tenant that was served least, by weight, is next: virtual token counters.

    What is charged is work: input that was computed (not what was cached), output at twice that, and the
    memory that a turn holds, as tokens of input per token and second. Objective: while two tenants both
    wait, each gets its weighted share, whatever it asks for.
    """

    def __init__(
        self,
        outlook: Outlook,
        inner: Callable[[], Lined],
        *,
        weight: Callable[[str], float] = lambda _: 1.0,
        memory: float = 0.0,
    ) -> None:
        """inner: makes the order within a tenant. memory: tokens charged per token held and second."""
        self._outlook = outlook
        self._make = inner
        self._weight = weight
        self._memory = memory
        self._tokens = VirtualTokens(weight)
        self._orders: dict[str, Lined] = {}
        self._waiting: list[tuple[float, float, str]] = []  # (counter, since when, tenant) with turns in line
        self._since: dict[str, float] = {}
        self._turns: dict[str, int] = {}  # of each tenant that has any: turns that wait or run
        self._floor = 0.0  # who comes when nobody else is here counts as served so much

    def served(self, tenant: str) -> float:
        """Weighted service that it has had, in tokens of input."""
        return self._tokens.counter(tenant)

    def entered(self, session: Session, now: float) -> None:
        tenant = session.tenant
        order = self._orders.get(tenant)
        if order is None:
            order = self._orders[tenant] = self._make()
        turn = session.running_turn
        if not (turn.preemptions or turn.relegated):  # such a one comes back into line
            self._arrived(tenant)
        if not len(order):
            self._since[tenant] = now
            insort(self._waiting, self._key(tenant))
        order.entered(session, now)

    def _arrived(self, tenant: str) -> None:
        """Whoever was away saved nothing up: it comes back level with the least served of those here, or
        with the last that were. (VTC's artifact lifts only if others wait; then a tenant that had the machine
        to itself would owe all of that to the next one who comes.)"""
        turns = self._turns.get(tenant, 0)
        if not turns:
            here = [self._tokens.counter(other) for other in self._turns]
            self._tokens.lift(tenant, min(here, default=self._floor))
        self._turns[tenant] = turns + 1

    def left(self, session: Session, now: float) -> None:
        tenant = session.tenant
        order = self._orders[tenant]
        order.left(session, now)
        if not len(order):
            del self._waiting[self._place(tenant)]
            del self._since[tenant]

    def line(self, now: float) -> Iterator[Session]:
        """Each turn that is drawn counts at once as served with what it lacks, so that a line of many is
        shared as it would be if they entered one by one."""
        ranked = 0
        drawn: list[tuple[float, float, str, Iterator[Session]]] = []
        while True:
            nearest = drawn[0][:2] if drawn else None
            if ranked < len(self._waiting) and (nearest is None or self._waiting[ranked][:2] <= nearest):
                counter, since, tenant = self._waiting[ranked]
                turns = self._orders[tenant].line(now)
                ranked += 1
            elif drawn:
                counter, since, tenant, turns = heapq.heappop(drawn)
            else:
                return
            session = next(turns, None)
            if session is None:
                continue
            yield session
            counter += INPUT_WEIGHT * self._outlook.lacking(session) / self._weight(tenant)
            heapq.heappush(drawn, (counter, since, tenant, turns))

    def standing(self, running: Sequence[Session], now: float) -> Sequence[Session]:
        return by_priority(running)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        charges: dict[str, float] = {}
        held = self._memory * seconds  # per token
        for each in ran:
            tenant = each.session.tenant
            cost = INPUT_WEIGHT * each.read + OUTPUT_WEIGHT * each.written
            if held:
                cost += INPUT_WEIGHT * held * len(each.session.tokens)
            charges[tenant] = charges.get(tenant, 0.0) + cost
        moved = [tenant for tenant in charges if tenant in self._since]
        few = len(moved) * MOVED_EACH < len(self._waiting)
        for tenant in moved if few else ():
            del self._waiting[self._place(tenant)]
        for tenant, cost in charges.items():
            self._tokens.charge(tenant, other=cost)
        if few:
            for tenant in moved:
                insort(self._waiting, self._key(tenant))
        else:
            self._waiting = sorted(map(self._key, self._since))

    def _key(self, tenant: str) -> tuple[float, float, str]:
        return self._tokens.counter(tenant), self._since[tenant], tenant

    def _place(self, tenant: str) -> int:
        return bisect_left(self._waiting, self._key(tenant))

    def ended(self, session: Session, now: float) -> None:
        tenant = session.tenant
        self._orders[tenant].ended(session, now)
        self._turns[tenant] -= 1
        if not self._turns[tenant]:
            del self._turns[tenant]
            self._floor = max(self._floor, self._tokens.counter(tenant))
        if len(self._orders) > MOST_IDLE and tenant not in self._turns:
            del self._orders[tenant]
            self._tokens.forget(tenant)


class Rounds(Order):
    """Tenants in turn, each with a quantum of tokens per round: deficit round robin."""

    def __init__(
        self,
        outlook: Outlook,
        inner: Callable[[], Lined],
        *,
        quantum: float,
        weight: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        self._outlook = outlook
        self._make = inner
        self._rule = DeficitRoundRobin(quantum, weight)
        self._orders: dict[str, Lined] = {}

    def entered(self, session: Session, now: float) -> None:
        tenant = session.tenant
        order = self._orders.get(tenant)
        if order is None:
            order = self._orders[tenant] = self._make()
        self._rule.arrived(tenant)
        order.entered(session, now)

    def left(self, session: Session, now: float) -> None:
        tenant = session.tenant
        order = self._orders[tenant]
        order.left(session, now)
        if not len(order):
            self._rule.emptied(tenant)
            del self._orders[tenant]

    def line(self, now: float) -> Iterator[Session]:
        rule = self._rule.copy()
        lines = {tenant: order.line(now) for tenant, order in self._orders.items()}
        left = {tenant: len(order) for tenant, order in self._orders.items()}
        while (tenant := rule.next()) is not None:
            session = next(lines[tenant], None)
            if session is None:
                rule.emptied(tenant)
                continue
            yield session
            rule.charge(tenant, self._outlook.lacking(session))
            left[tenant] -= 1
            if not left[tenant]:
                rule.emptied(tenant)

    def standing(self, running: Sequence[Session], now: float) -> Sequence[Session]:
        return by_priority(running)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        for each in ran:
            self._rule.charge(each.session.tenant, each.read + OUTPUT_WEIGHT * each.written)
