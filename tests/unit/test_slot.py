"""When a dead worker is replaced, when its place is given up, and counters that never fall."""

from __future__ import annotations

from typing import cast

from agentserve.messages import WorkerView
from agentserve.server.workers.slot import RestartPolicy, Slot
from agentserve.server.workers.supervisor import WorkerProcess

POLICY = RestartPolicy(first_pause=1.0, longest_pause=3.0, quick=10.0, attempts=4)
WORKER = cast(WorkerProcess, object())


def view(generated: int) -> WorkerView:
    return WorkerView(2, 1, 3, 50, 10, 20, 20, 7, 6, generated, 4, 3, 2)


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


def test_counters_add_up_over_workers_and_gauges_do_not() -> None:
    slot = Slot(0, POLICY)
    assert slot.view() is None
    slot.up(WORKER, 0.0)
    slot.last_view = view(100)
    slot.down(1.0)
    dead = slot.view()
    assert dead is not None
    assert (dead.generated_tokens, dead.running, dead.pages_live, dead.pages_free) == (100, 0, 0, 50)
    slot.up(WORKER, 2.0)
    slot.last_view = view(5)
    now = slot.view()
    assert now is not None
    assert (now.generated_tokens, now.steps, now.running, now.pages_live) == (105, 4, 2, 20)
    slot.down(3.0)
    slot.down(4.0)  # a place without a worker loses nothing twice
    again = slot.view()
    assert again is not None
    assert again.generated_tokens == 105
