"""What was learned of sessions' waits, each tenant's own.

How long a tool takes, how often its callers come back, how far clients are believed and how loudly they
speak are things about a tenant: shared, they would show in what others are decided. Pure and bounded: while
there are more than `MOST_TENANTS`, or more than `MOST_NAMES` names of tools in all, what was learned of the
tenant that was not heard of for longest goes, and is learned anew.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tiering.credit import Credit
from tiering.waits import WaitCurves, WaitSettings

MOST_TENANTS = 256
MOST_NAMES = 2048  # under 32 MB


@dataclass(slots=True)
class Learned:
    """Of one tenant."""

    curves: WaitCurves
    credit: Credit = field(default_factory=Credit)
    returns: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (came back, did not)
    loud: float = 0.0  # mean priority of parks as of late: what everybody says is nothing special


class LearnedByTenant:
    def __init__(self, settings: WaitSettings | None = None) -> None:
        self._settings = settings
        self._of: dict[str, Learned] = {}  # least recently heard of first

    def __len__(self) -> int:
        return len(self._of)

    def heard(self, tenant: str) -> Learned:
        """Of the tenant that something has just happened to."""
        found = self._of.pop(tenant, None) or Learned(WaitCurves(self._settings))
        self._of[tenant] = found
        while len(self._of) > 1 and (len(self._of) > MOST_TENANTS or self._names() > MOST_NAMES):
            del self._of[next(iter(self._of))]
        return found

    def of(self, tenant: str) -> Learned | None:
        return self._of.get(tenant)

    @property
    def predicted(self) -> dict[str, tuple[int, int, int]]:
        """By tool, for operators: waits that ended, how many of them by their predicted median and P90."""
        told: dict[str, Counter[int]] = {}
        for learned in self._of.values():
            for name, numbers in learned.curves.predicted.items():
                told.setdefault(name, Counter()).update(dict(enumerate(numbers)))
        return {name: (n[0], n[1], n[2]) for name, n in told.items()}

    def _names(self) -> int:
        return sum(learned.curves.known for learned in self._of.values())
