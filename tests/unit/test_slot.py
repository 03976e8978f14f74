"""When a dead worker is replaced, when its place is given up, and what is left of its view."""

from __future__ import annotations

from typing import cast

from agentserve.messages import WorkerView
from agentserve.server.workers.slot import RestartPolicy, Slot
from agentserve.server.workers.supervisor import WorkerProcess

POLICY = RestartPolicy(first_pause=1.0, longest_pause=3.0, quick=10.0, attempts=4)
WORKER = cast(WorkerProcess, object())


def die_after(slot: Slot, lived: float, at: float = 0.0) -> float | None:
    slot.up(WORKER, at)
    slot.down(at + lived)
    return slot.next_pause()


def test_pauses_grow_to_a_limit_and_quick_deaths_end_it() -> None:
    slot = Slot(0, POLICY)
    assert [die_after(slot, 1.0) for _ in range(4)] == [1.0, 2.0, 3.0, None]
    assert slot.given_up


def test_failed_starts_count_as_quick_deaths() -> None:
    slot = Slot(0, POLICY)
    assert die_after(slot, 1.0) == 1.0
    pauses = []
    for _ in range(3):
        slot.failed_start()
        pauses.append(slot.next_pause())
    assert pauses == [2.0, 3.0, None]


def test_a_long_life_is_forgiven() -> None:
    slot = Slot(0, POLICY)
    for _ in range(20):
        assert die_after(slot, 11.0) == 1.0
    assert not slot.given_up


def test_a_dead_workers_load_is_gone_and_its_pages_are_free() -> None:
    slot = Slot(0, POLICY)
    assert slot.last_view is None
    slot.down(1.0)  # died before it reported anything
    slot.up(WORKER, 0.0)
    slot.last_view = WorkerView(2, 1, 3, 50, 10, 20, 20)
    slot.down(1.0)
    assert slot.last_view == WorkerView(0, 0, 0, 50, 50, 0, 0)


def test_a_new_worker_owes_no_answer_of_the_last() -> None:
    slot = Slot(0, POLICY)
    slot.up(WORKER, 0.0)
    slot.unanswered = True
    slot.down(1.0)
    slot.up(WORKER, 2.0)
    assert not slot.unanswered
