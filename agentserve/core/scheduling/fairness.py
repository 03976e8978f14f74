"""Whose turn is next when tenants share a machine: two rules, each over (tenant, cost) alone.

Virtual token counter (Sheng et al., OSDI 2024): who has been served least, by weight, is next. Objective:
while two tenants both wait, what they were served differs by a constant, whatever they ask for.

Deficit round robin (Shreedhar and Varghese 1995, as used for tokens): tenants in turn, each with a
quantum per round. Objective: the same, at a constant cost per decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # of a token read and a token written (VTC, section 5)


class VirtualTokens:
    """Service received by each tenant, in weighted tokens divided by the tenant's weight.

    A tenant that comes back from silence is lifted to the least counter of the others that wait: silence
    saves nothing up. The bound on the gap of two tenants that wait is 2·max(largest input, largest batch).
    """

    def __init__(self, weight: Callable[[str], float] = lambda _: 1.0) -> None:
        """weight: of a tenant, above 0."""
        self._weight = weight
        self._counters: dict[str, float] = {}

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def arrived(self, tenant: str, waiting: Iterable[str]) -> None:
        """A turn of `tenant`, which had none waiting, has arrived. waiting: those that have turns in line."""
        others = [self.counter(other) for other in waiting if other != tenant]
        if others:
            self.lift(tenant, min(others))

    def lift(self, tenant: str, floor: float) -> None:
        """It is not to count as served less than `floor`."""
        if floor > self.counter(tenant):
            self._counters[tenant] = floor

    def charge(self, tenant: str, *, read: float = 0.0, written: float = 0.0, other: float = 0.0) -> None:
        """Tokens that were run for it: uncached input, output, and what else it took as tokens of input."""
        service = INPUT_WEIGHT * (read + other) + OUTPUT_WEIGHT * written
        self._counters[tenant] = self.counter(tenant) + service / self._weight(tenant)

    def next(self, heads: Mapping[str, float]) -> str:
        """Who is next. heads: when the first turn in line of each tenant that waits arrived; not empty."""
        return min(heads, key=lambda tenant: (self.counter(tenant), heads[tenant], tenant))

    def forget(self, tenant: str) -> None:
        """It has been away for so long that its past does not count."""
        self._counters.pop(tenant, None)


class DeficitRoundRobin:
    """Tenants in turn. One whose deficit is used up gets a quantum when the round comes to it, and is
    served while it has some: the last turn may overdraw it. Who has nothing left in line keeps no credit."""

    def __init__(self, quantum: float, weight: Callable[[str], float] = lambda _: 1.0) -> None:
        """quantum: tokens per round, above 0; times the weight of the tenant."""
        if not quantum > 0:
            raise ValueError(f"quantum: expected more than 0, got {quantum}")
        self._quantum = quantum
        self._weight = weight
        self._round: deque[str] = deque()  # tenants with turns in line; the first is being visited
        self._deficits: dict[str, float] = {}
        self._fresh = True  # the visit of the first one has not begun

    def copy(self) -> DeficitRoundRobin:
        """To see who would be next, and next after that, without serving anybody."""
        other = DeficitRoundRobin(self._quantum, self._weight)
        other._round, other._deficits = self._round.copy(), self._deficits.copy()
        other._fresh = self._fresh
        return other

    def deficit(self, tenant: str) -> float:
        return self._deficits.get(tenant, 0.0)

    def arrived(self, tenant: str) -> None:
        """It has a turn in line (again)."""
        if tenant not in self._deficits:
            self._deficits[tenant] = 0.0
            self._round.append(tenant)

    def next(self) -> str | None:
        """Whose head of line is to be served; None if nobody waits."""
        if not self._round:
            return None
        visited = 0
        while True:
            if visited == len(self._round):
                self._pass_over()
            visited += 1
            tenant = self._round[0]
            if self._fresh and self._deficits[tenant] <= 0:
                self._deficits[tenant] += self._quantum * self._weight(tenant)
            self._fresh = False
            if self._deficits[tenant] > 0:
                return tenant
            self._turn_to_next()

    def _pass_over(self) -> None:
        """All are in debt: pay off as many rounds as serve nobody. The order stays as it is."""
        quanta = {tenant: self._quantum * self._weight(tenant) for tenant in self._round}
        rounds = min(-self._deficits[tenant] // quantum for tenant, quantum in quanta.items())
        for tenant, quantum in quanta.items():
            self._deficits[tenant] += rounds * quantum

    def charge(self, tenant: str, cost: float) -> None:
        """What serving it took. Output may be charged later, as it comes."""
        if tenant in self._deficits:
            self._deficits[tenant] -= cost

    def emptied(self, tenant: str) -> None:
        """Nothing of it is in line any more: credit is not saved up, nor is debt."""
        if tenant not in self._deficits:
            return
        del self._deficits[tenant]
        if self._round[0] == tenant:
            self._round.popleft()
            self._fresh = True
        else:
            self._round.remove(tenant)

    def _turn_to_next(self) -> None:
        self._round.rotate(-1)
        self._fresh = True
