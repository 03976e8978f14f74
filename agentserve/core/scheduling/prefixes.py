"""Orders by what a turn shares with the cache and with others that wait (SGLang, RadixAttention).

Objective: each shared prefix is computed once and used while it is there. By itself that starves prompts
that share nothing, so what a turn saves counts as having come earlier, by no more than `most` seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from agentserve.core.scheduling.orders import Keyed
from agentserve.core.scheduling.policy import Order, Outlook
from agentserve.core.session import Session

EXAMINED = 128  # longer lines are served as they came: to match them all would cost more than it saves


class LongestPrefix(Order):
    """The turn with the most tokens in the cache first."""

    def __init__(self, outlook: Outlook, *, per_token: float, most: float) -> None:
        """per_token: seconds that a cached token counts as having come earlier; most: bound on that."""
        self._outlook = outlook
        self._per_token = per_token
        self._most = most
        self._arrivals = Keyed()

    def __len__(self) -> int:
        return len(self._arrivals)

    def entered(self, session: Session, now: float) -> None:
        self._arrivals.entered(session, now)

    def left(self, session: Session, now: float) -> None:
        self._arrivals.left(session, now)

    def line(self, now: float) -> Iterator[Session]:
        if len(self._arrivals) > EXAMINED:
            yield from self._arrivals.line(now)
            return
        yield from sorted(self._arrivals.line(now), key=self._place)

    def _place(self, session: Session) -> float:
        saved = min(self._outlook.cached(session) * self._per_token, self._most)
        return session.running_turn.arrived - saved


class HeaviestBranch(Order):
    """Depth first over the prefixes that waiting turns share: the branch that most of them wait under goes
    first, and all of it, before the next (SGLang's dfs-weight)."""

    def __init__(self, *, patience: float) -> None:
        """patience: seconds after which a turn is served as it came."""
        self._patience = patience
        self._arrivals = Keyed()

    def __len__(self) -> int:
        return len(self._arrivals)

    def entered(self, session: Session, now: float) -> None:
        self._arrivals.entered(session, now)

    def left(self, session: Session, now: float) -> None:
        self._arrivals.left(session, now)

    def line(self, now: float) -> Iterator[Session]:
        waiting = list(islice(self._arrivals.line(now), EXAMINED))
        impatient = [s for s in waiting if now - s.running_turn.arrived >= self._patience]
        yield from impatient
        late = {session.id for session in impatient}
        yield from _depth_first([session for session in waiting if session.id not in late], 0)
        yield from islice(self._arrivals.line(now), EXAMINED, None)


def _depth_first(turns: list[Session], shared: int) -> Iterator[Session]:
    """turns: all share `shared` tokens, and are in order of arrival."""
    if len(turns) < 2:
        yield from turns
        return
    branches: dict[tuple[bytes, int], list[Session]] = {}
    alone: list[Session] = []
    for session in turns:
        if len(session.tokens) > shared:
            branches.setdefault((session.namespace, session.tokens[shared]), []).append(session)
        else:
            alone.append(session)
    for branch in sorted(branches.values(), key=len, reverse=True):
        yield from branch if len(branch) == 1 else _depth_first(branch, _common(branch, shared))
    yield from alone


def _common(turns: Sequence[Session], shared: int) -> int:
    """How many tokens all of these share, if they share the one at `shared`."""
    first = turns[0].tokens
    length = min(len(session.tokens) for session in turns)
    low, high = shared + 1, length
    while low < high:  # binary search, as slices compare fast
        middle = (low + high + 1) // 2
        run = first[shared:middle]
        if all(session.tokens[shared:middle] == run for session in turns):
            low = middle
        else:
            high = middle - 1
    return low
