"""When a dead worker is replaced, when its place is given up, and what is left of its view."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from agentserve.messages import AheadCounts, PreemptionCounts, PromiseCounts, RunCounts, TiersView, WorkerView
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


def tiers(**changes: Any) -> WorkerView:
    view = TiersView(host=3, host_slots=4, disk=5, disk_budget=100, block_bytes=10, moving=2, pinned=1)
    return WorkerView(0, 0, 0, 50, 50, 0, 0, msgspec.structs.replace(view, **changes))


def test_counters_go_on_where_the_last_worker_stopped() -> None:
    slot = Slot(0, POLICY)
    slot.up(WORKER, 0.0)
    slot.report(
        tiers(hit_tokens={"host": 16}, moved={"save": (2, 0.5)}, takeovers=1, faults={"late": 2}), 1.0
    )
    assert slot.view == slot.last_view, "as it was told"
    slot.down(2.0)
    left = slot.view
    assert left is not None
    assert left.tiers is not None
    assert (left.tiers.host, left.tiers.moving, left.tiers.pinned) == (0, 0, 0), "gone with its memory"
    assert (left.tiers.disk, left.tiers.hit_tokens) == (5, {"host": 16})
    slot.down(2.0)  # a start that failed counts nothing twice
    slot.up(WORKER, 3.0)
    slot.report(
        tiers(
            hit_tokens={"host": 4, "disk": 8},
            moved={"save": (1, 0.25), "load": (1, 1.0)},
            waits={"grep": (3, 2, 1)},
            faults={"late": 1, "corrupt": 1},
        ),
        4.0,
    )
    for _ in range(2):  # looking changes nothing
        view = slot.view
        assert view is not None
        assert view.tiers is not None
        assert view.tiers.hit_tokens == {"host": 20, "disk": 8}
        assert view.tiers.moved == {"save": (3, 0.75), "load": (1, 1.0)}
        assert view.tiers.faults == {"late": 3, "corrupt": 1}
        assert (view.tiers.host, view.tiers.moving, view.tiers.takeovers) == (3, 2, 1)
    slot.down(5.0)
    slot.up(WORKER, 6.0)
    slot.report(tiers(waits={"grep": (1, 1, 1), "find": (1, 0, 0)}), 7.0)
    view = slot.view
    assert view is not None
    assert view.tiers is not None
    assert view.tiers.waits == {"grep": (4, 3, 2), "find": (1, 0, 0)}
    assert view.tiers.hit_tokens == {"host": 20, "disk": 8}


def test_a_disk_fails_since_it_was_first_said() -> None:
    slot = Slot(0, POLICY)
    slot.up(WORKER, 0.0)
    for at, error, since in ((1.0, "", None), (2.0, "full", 2.0), (3.0, "lost", 2.0), (4.0, "", None)):
        slot.report(tiers(disk_error=error), at)
        assert slot.disk_failing_since == since
    slot.report(tiers(disk_error="full"), 5.0)
    slot.down(6.0)
    assert slot.disk_failing_since is None
    assert slot.view is not None
    assert slot.view.tiers is not None
    assert slot.view.tiers.disk_error == "", "nobody uses it now"


def test_a_new_worker_owes_no_answer_of_the_last() -> None:
    slot = Slot(0, POLICY)
    slot.up(WORKER, 0.0)
    slot.unanswered = True
    slot.down(1.0)
    slot.up(WORKER, 2.0)
    assert not slot.unanswered


def test_what_was_computed_ahead_is_counted_over_all_workers_of_a_place() -> None:
    slot = Slot(0, POLICY)
    for at, counts in ((0.0, AheadCounts(30, 20)), (10.0, AheadCounts(7, 0))):
        slot.up(WORKER, at)
        slot.report(msgspec.structs.replace(tiers(), ahead=counts), at + 1.0)
        slot.down(at + 2.0)
        assert slot.view is not None
    assert slot.view.ahead == AheadCounts(37, 20)
    slot.up(WORKER, 20.0)
    slot.report(msgspec.structs.replace(tiers(), tiers=None, ahead=AheadCounts(1, 1)), 21.0)
    assert slot.view.ahead == AheadCounts(38, 21)


def test_promises_are_counted_over_all_workers_of_a_place() -> None:
    slot = Slot(0, POLICY)
    for at, counts in ((0.0, PromiseCounts(3, 2, 9, 1)), (10.0, PromiseCounts(1, 0, 0, 4))):
        slot.up(WORKER, at)
        slot.report(msgspec.structs.replace(tiers(), promises=counts), at + 1.0)
        slot.down(at + 2.0)
    assert slot.view is not None
    assert slot.view.promises == PromiseCounts(4, 2, 9, 5)
    slot.up(WORKER, 20.0)
    slot.report(msgspec.structs.replace(tiers(), promises=PromiseCounts(1, 1, 1, 1)), 21.0)
    assert slot.view.promises == PromiseCounts(5, 3, 10, 6)


def test_lines_that_were_not_recorded_are_those_of_all_workers_of_a_place() -> None:
    slot = Slot(0, POLICY)
    for lost in (3, 4):
        slot.up(WORKER, 0.0)
        slot.report(WorkerView(0, 0, 0, 50, 50, 0, 0, unrecorded=lost), 1.0)
        slot.down(2.0)
    assert slot.view is not None
    assert slot.view.unrecorded == 7


def test_no_counter_of_a_view_is_forgotten() -> None:
    """What a worker that died had told is all there yet, but for what it held: whatever fields come to be."""
    held = {"running", "waiting", "sessions", "pages", "pages_free", "pages_cached", "pages_live", "groups"}
    slot = Slot(0, POLICY)
    slot.up(WORKER, 0.0)
    told = WorkerView(
        0, 0, 0, 50, 50, 0, 0,
        tiers=TiersView(hit_tokens={"host": 1}), ahead=AheadCounts(1, 1), unrecorded=1,
        promises=PromiseCounts(1, 1, 1, 1), preempted=PreemptionCounts({"seat": {"swap": 1}}, 1, 1, 1, 1),
        runs=RunCounts(1, 1, 1),
    )  # fmt: skip
    counters = set(told.__struct_fields__) - held
    plain = WorkerView(0, 0, 0, 50, 50, 0, 0)
    assert all(getattr(told, name) != getattr(plain, name) for name in counters), "a counter is not tried"
    slot.report(told, 1.0)
    slot.down(2.0)
    assert slot.view is not None
    assert all(getattr(slot.view, name) == getattr(told, name) for name in counters)
