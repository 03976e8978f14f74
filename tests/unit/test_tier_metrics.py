"""Metrics of tiers: right sums, totals that never fall, labels that stay few."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from agentserve.messages import AheadCounts, RunCounts, TiersView, WorkerView
from agentserve.metrics import Metrics
from agentserve.tier_metrics import LONGEST_NAME, MOST_TOOLS, OTHER


def worker(**fields: Any) -> WorkerView:
    tiers = TiersView(**{"block_bytes": 100, "host_slots": 8, "disk_budget": 1050, **fields})
    return WorkerView(0, 0, 0, pages=10, pages_free=3, pages_cached=5, pages_live=2, tiers=tiers)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    text = metrics.render().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_tier_has_its_blocks_bytes_and_room() -> None:
    metrics = Metrics()
    metrics.set_workers(
        2, [worker(host=3, disk=4, disk_bytes=410, moving=2, pinned=1), worker(disk_error="full")]
    )
    found = samples(metrics)
    expected = {
        ("blocks", "device"): 14, ("blocks", "host"): 3, ("blocks", "disk"): 4,
        ("bytes", "device"): 1400, ("bytes", "host"): 300, ("bytes", "disk"): 410,
        ("capacity_blocks", "device"): 20, ("capacity_blocks", "host"): 16, ("capacity_blocks", "disk"): 20,
        ("capacity_bytes", "device"): 2000, ("capacity_bytes", "host"): 1600,
        ("capacity_bytes", "disk"): 2100,
        ("moving_blocks",): 2, ("pinned_pages",): 1, ("disk_failing_workers",): 1,
    }  # fmt: skip
    for (name, *labels), value in expected.items():
        assert found[f"agentserve_tier_{name}", *labels] == value, (name, labels)
    assert found["agentserve_kv_pages_live",] == 4, "live pages are told apart from cached ones"
    assert found["agentserve_kv_pages_cached",] == 10


def test_counters_are_there_from_the_start() -> None:
    found = samples(Metrics())
    for name, labels in (
        ("hit_tokens", ("device", "host", "disk")),
        ("evicted_blocks", ("device", "host", "disk")),
        ("moved_blocks", ("save", "load", "write", "fetch", "drop")),
        ("moved_bytes", ("save", "load", "write", "fetch", "drop")),
        ("move_seconds", ("save", "load", "write", "fetch", "drop")),
        ("failed_blocks", ("save", "load", "write", "fetch", "drop")),
        ("decisions", ("hold", "host", "disk", "drop", "restore")),
        ("faults", ("corrupt", "misplaced", "missing", "unindexed", "unreadable", "unwritable")),
        ("faults", ("late", "discarded", "unopened")),
    ):
        for label in labels:
            assert found[f"agentserve_tier_{name}_total", label] == 0, (name, label)
    assert found["agentserve_ahead_tokens_total", "computed"] == 0
    assert found["agentserve_tier_policy_takeovers_total",] == 0


def test_totals_of_all_workers_are_followed_and_never_fall() -> None:
    metrics = Metrics()
    first = worker(
        hit_tokens={"host": 16}, moved={"save": (3, 0.5)}, failed={"fetch": 1}, evicted={"host": 2},
        decisions={"hold": 4, "drop": 1}, faults={"corrupt": 3}, takeovers=1, waits={"grep": (4, 2, 3)},
    )  # fmt: skip
    second = worker(hit_tokens={"host": 4, "disk": 8}, moved={"save": (1, 0.25)}, takeovers=2)

    def read() -> list[float]:
        found = samples(metrics)
        names = [
            ("tier_hit_tokens", "host"), ("tier_hit_tokens", "disk"), ("tier_moved_blocks", "save"),
            ("tier_moved_bytes", "save"), ("tier_move_seconds", "save"), ("tier_failed_blocks", "fetch"),
            ("tier_evicted_blocks", "host"), ("tier_decisions", "hold"), ("tier_decisions", "drop"),
            ("tier_policy_takeovers",), ("tool_waits_predicted", "grep"),
            ("tool_waits_within_median", "grep"), ("tool_waits_within_p90", "grep"),
        ]  # fmt: skip
        return [found[f"agentserve_{name}_total", *labels] for name, *labels in names]

    all_of_it = [20, 8, 4, 400, 0.75, 1, 2, 4, 1, 3, 4, 2, 3]
    for _ in range(2):  # what is told again is not counted again
        metrics.set_workers(2, [first, second])
        assert read() == all_of_it
    metrics.set_workers(0, [])  # nobody answers
    assert read() == all_of_it
    metrics.set_workers(1, [first])
    assert read() == all_of_it
    metrics.set_workers(
        2, [first, worker(hit_tokens={"host": 6, "disk": 8}, moved={"save": (1, 0.25)}, takeovers=2)]
    )
    assert read() == [22, *all_of_it[1:]]


def test_workers_without_tiers_leave_everything_at_zero() -> None:
    metrics = Metrics()
    metrics.set_workers(1, [WorkerView(1, 1, 1, 10, 3, 5, 2)])
    found = samples(metrics)
    tiers = {name: value for name, value in found.items() if name[0].startswith("agentserve_tier_")}
    assert {value for name, value in tiers.items() if not name[0].endswith("_created")} == {0}


def test_clients_cannot_make_labels_without_end() -> None:
    metrics = Metrics()
    for number in range(3 * MOST_TOOLS):
        metrics.tiers.waited(f"tool{number}", 1.0)
    metrics.tiers.waited("tool0", -5.0)  # a clock that was set back
    metrics.set_workers(1, [worker(waits={"new": (3, 1, 2), "newer": (1, 0, 1), "tool1": (5, 2, 4)})])
    found = samples(metrics)
    counts = {
        name[1]: value for name, value in found.items() if name[0] == "agentserve_tool_wait_seconds_count"
    }
    assert len(counts) == MOST_TOOLS + 1
    assert (counts["tool0"], counts["tool49"], counts[OTHER]) == (2, 1, 2 * MOST_TOOLS)
    assert found["agentserve_tool_waits_predicted_total", OTHER] == 4
    assert found["agentserve_tool_waits_predicted_total", "tool1"] == 5
    odd = Metrics()
    odd.tiers.waited('a"b\n\ud800', 0.3)
    assert samples(odd)["agentserve_tool_wait_seconds_count", 'a"b??'] == 1
    long = Metrics()
    long.tiers.waited("x" * 10_000, 0.3)
    assert samples(long)["agentserve_tool_wait_seconds_count", "x" * LONGEST_NAME] == 1


def test_waits_fall_into_buckets_of_seconds() -> None:
    metrics = Metrics()
    for seconds in (0.05, 1.5, 84.0):
        metrics.tiers.waited("grep", seconds)
    found = samples(metrics)
    bucket = "agentserve_tool_wait_seconds_bucket"
    assert [found[bucket, le, "grep"] for le in ("0.1", "2.0", "100.0")] == [1, 2, 3]
    assert found["agentserve_tool_wait_seconds_sum", "grep"] == 85.55


def test_tokens_computed_ahead_are_counted_without_tiers_too() -> None:
    metrics = Metrics()
    bare = WorkerView(0, 0, 0, 10, 3, 5, 2, ahead=AheadCounts(40, 30))
    for views, expected in (([bare, bare], (80, 60)), ([bare], (80, 60)), ([], (80, 60))):
        metrics.set_workers(len(views), views)
        found = samples(metrics)
        assert found["agentserve_ahead_tokens_total", "computed"] == expected[0]
        assert found["agentserve_ahead_tokens_total", "used"] == expected[1]


def test_bytes_that_were_swapped_are_what_was_moved_to_and_from_the_device() -> None:
    metrics = Metrics()
    moved = {"save": (5, 1.0), "load": (3, 1.0), "fetch": (2, 1.0), "borrow": (1, 1.0), "write": (9, 1.0)}
    metrics.set_workers(2, [worker(moved=moved), worker(moved={"save": (1, 0.0)})])
    found = samples(metrics)
    assert found["agentserve_swap_bytes_total", "in"] == 600
    assert found["agentserve_swap_bytes_total", "out"] == 600


def test_steps_are_counted_by_how_they_were_run_where_any_are_recorded() -> None:
    metrics = Metrics()
    metrics.set_workers(1, [worker()])
    assert b"agentserve_steps_run_total{" not in metrics.render()
    told = WorkerView(1, 1, 1, 10, 3, 5, 2, runs=RunCounts(7, 0, 2))
    metrics.set_workers(2, [told, told])
    page = metrics.render().decode()
    assert 'agentserve_steps_run_total{how="replayed"} 14.0' in page
    assert 'agentserve_steps_run_total{how="launched"} 4.0' in page
    assert 'how="missed"' not in page
