"""What a worker's place has counted over all the workers that held it: counters that never fall."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from agentserve.messages import AheadCounts, PreemptionCounts, PromiseCounts, RunCounts, TiersView

Value = TypeVar("Value")
Counts = TypeVar("Counts", AheadCounts, PromiseCounts, RunCounts)  # all of whose fields only grow


def carried(before: TiersView | None, now: TiersView | None) -> TiersView | None:
    """`now`, with what earlier workers of the place had counted added to its counters."""
    if before is None or now is None:
        return now if now is not None else before
    return msgspec.structs.replace(
        now,
        hit_tokens=_merged(before.hit_tokens, now.hit_tokens, operator.add),
        moved=_merged(before.moved, now.moved, lambda a, b: (a[0] + b[0], a[1] + b[1])),
        failed=_merged(before.failed, now.failed, operator.add),
        evicted=_merged(before.evicted, now.evicted, operator.add),
        decisions=_merged(before.decisions, now.decisions, operator.add),
        takeovers=before.takeovers + now.takeovers,
        faults=_merged(before.faults, now.faults, operator.add),
        waits=_merged(before.waits, now.waits, lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] + b[2])),
    )


def added(before: Counts, now: Counts) -> Counts:
    return type(now)(*map(operator.add, msgspec.structs.astuple(before), msgspec.structs.astuple(now)))


def summed(before: PreemptionCounts, now: PreemptionCounts) -> PreemptionCounts:
    """Counts of preemptions of two workers of one place."""
    return PreemptionCounts(
        made=_merged(before.made, now.made, lambda a, b: _merged(a, b, operator.add)),
        swapped=before.swapped + now.swapped,
        returned=before.returned + now.returned,
        asked=before.asked + now.asked,
        migrated=before.migrated + now.migrated,
    )


def ended(view: TiersView) -> TiersView:
    """The last view of a worker that died: what it held in memory is gone, what it counted stays."""
    return msgspec.structs.replace(view, host=0, moving=0, pinned=0, disk_error="")


def _merged(
    left: Mapping[str, Value], right: Mapping[str, Value], add: Callable[[Value, Value], Value]
) -> dict[str, Value]:
    merged = dict(left)
    for name, value in right.items():
        merged[name] = add(merged[name], value) if name in merged else value
    return merged
