"""What arrives and what is moved while a step runs takes nothing from it (INV-134).

As the worker's loop does it: commands that the core lets wait are handled when the step is over, and so is
all that came after them; the others, and transfers, while it runs.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.plan import Plan
from agentserve.messages import Command
from agentserve.sim.mover import Faults
from tests.engines import TierRig, WildPolicy
from tests.histories import TIER_OPERATIONS, History
from tests.property.test_tier_histories import finish

STEPPING = ("steps", "upload", "fails", "abort in flight", "fork in flight", "told in flight",
            "devalue in flight", "result in flight")  # fmt: skip


class Overlapping(TierRig):
    """Handles at once what may be while a step runs, and the rest after it."""

    def __init__(self, *, cautious: bool = True, **config: object) -> None:
        super().__init__(**config)  # type: ignore[arg-type]
        self.cautious = cautious
        self.flying: Plan | None = None
        self.later: list[Command] = []
        self._now = self.core.handle
        self.core.handle = self._handle  # type: ignore[method-assign]

    def _handle(self, command: Command, now: float) -> None:
        if self.flying is not None and self.cautious and (self.later or self.core.must_wait(command)):
            self.later.append(command)
            return
        self._now(command, now)
        self.check_pages()

    def check_pages(self) -> None:
        """Somebody holds every page that the step reads or writes."""
        plan = self.flying
        if plan is None:
            return
        for group, pool in enumerate(self.core.kv.pools):
            used = {page for chunk in plan.chunks for page in chunk.tables[group]}
            used |= {
                page for copy in plan.copies if copy.group == group for page in (copy.source, copy.target)
            }
            assert all(pool.holds(page) for page in used), "a page of the step that runs was let go"

    def overlapped(self, history: History, arrivals: list, *, early: bool) -> None:  # type: ignore[type-arg]
        """A step, and what happens meanwhile. early: the model is done before any of that."""
        self.now += self.pace
        plan = self.flying = self.core.begin_step(self.now)
        result = self.executor.run(plan) if plan is not None and early else None
        for arrival in arrivals:
            if arrival[0] not in STEPPING:
                history.apply(arrival)
        self.move()
        self.check_pages()
        if plan is not None:
            self.core.finish_step(result or self.executor.run(plan), self.now)
        self.flying = None
        later, self.later = self.later, []
        for command in later:
            self._now(command, self.now)
        self._collect()
        self.move()


@given(
    st.lists(st.tuples(st.lists(TIER_OPERATIONS, max_size=6), st.booleans()), min_size=5, max_size=30),
    st.integers(20, 40),
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from([4, 64]),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_step_keeps_its_pages(
    steps: list,  # type: ignore[type-arg]
    pages: int,
    host: int,
    disk: int,
    budget: int,
    seed: int,
) -> None:
    rig = Overlapping(
        pages=(pages,), host=host, disk=disk, max_batched_tokens=budget, max_num_seqs=4,
        policy=WildPolicy(seed), faults=Faults(seed=seed, bad=0.1, late=0.2, slower=10.0),
    )  # fmt: skip
    history = History(rig)
    for arrivals, early in steps:
        rig.overlapped(history, arrivals, early=early)
    rig.drain()
    rig.settle()
    history.check_said()
    finish(rig)


def test_it_would_be_noticed() -> None:
    """An abort that does not wait lets go of pages that are written."""
    rig = Overlapping(cautious=False)
    history = History(rig)
    history.apply(("submit", 0, [1, 2, 3], 8, 0))
    rig.overlapped(history, [], early=True)
    with pytest.raises(AssertionError, match="let go"):
        rig.overlapped(history, [("abort", 0)], early=True)
