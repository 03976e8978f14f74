"""Who got how much, from the iterations of a run. Pure functions.

Service is work: tokens of input that were computed (not those found in the cache), and tokens that were
written at twice that (VTC, OSDI'24). A tenant is backlogged while turns of its wait to be admitted, and
active while any of its turns wait or run.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import combinations

import msgspec

from agentserve.sim.experiment.record import IterationRecord, RequestRecord

INPUT, OUTPUT = 1.0, 2.0
SUSTAINED = 10  # largest requests that a tenant must be entitled to in a backlog that counts


class Fairness(msgspec.Struct, frozen=True):
    """None: nobody was backlogged, or never two at once."""

    jain: float | None
    largest_gap: float | None  # weighted tokens
    shares: dict[str, float]  # by tenant that was backlogged: of what it was entitled to

    @property
    def least_share(self) -> float | None:
        return min(self.shares.values(), default=None)


def fairness(
    iterations: Sequence[IterationRecord],
    tenants: Sequence[str],
    weights: Sequence[float],
    largest: float = 0.0,
) -> Fairness:
    """tenants, weights: in the order of the records'. largest: work of the largest request; shares are of
    backlogs in which a tenant was entitled to `SUSTAINED` such."""
    shares = {
        tenant: share
        for number, tenant in enumerate(tenants)
        if (share := share_while_backlogged(iterations, number, weights, SUSTAINED * largest)) is not None
    }
    together = [each for each in iterations if all(each.backlogged)] if len(tenants) > 1 else []
    served = [sum(each.served[number] for each in together) / weight for number, weight in enumerate(weights)]
    return Fairness(jain(served) if together else None, largest_gap(iterations, weights), shares)


def jain(values: Sequence[float]) -> float | None:
    """Jain's index: (sum x)^2 / (n sum x^2). 1: all alike; 1/n: one has all. None of nothing."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def share_while_backlogged(
    iterations: Sequence[IterationRecord], tenant: int, weights: Sequence[float], sustained: float = 0.0
) -> float | None:
    """What a tenant got in the iterations in which it was backlogged, over what it was entitled to there: its
    weight's part of all that was served, among the tenants that were active.

    Only stretches of backlog count in which it was entitled to `sustained` work or more. Whoever comes finds
    another's prompt being computed, and waits for its end: of short waits that is all there is to see. None:
    there was no such stretch.
    """
    got = entitled = stretch_got = stretch_entitled = 0.0
    for each in iterations:
        if each.backlogged[tenant]:
            active = sum(weight for weight, is_active in zip(weights, each.active, strict=True) if is_active)
            stretch_got += each.served[tenant]
            stretch_entitled += sum(each.served) * weights[tenant] / active
            continue
        if stretch_entitled >= sustained:
            got, entitled = got + stretch_got, entitled + stretch_entitled
        stretch_got = stretch_entitled = 0.0
    if stretch_entitled >= sustained:
        got, entitled = got + stretch_got, entitled + stretch_entitled
    return got / entitled if entitled else None


def largest_work(requests: Sequence[RequestRecord]) -> float:
    """The most work that a request took, in weighted tokens."""
    return max(
        (INPUT * each.computed_tokens + OUTPUT * len(each.every_token_ts) for each in requests), default=0.0
    )


def largest_gap(iterations: Sequence[IterationRecord], weights: Sequence[float]) -> float | None:
    """The most that two tenants' weighted services grew apart within a stretch of time in which both were
    backlogged throughout: the bound that VTC gives is on this. None: there was no such stretch."""
    found = None
    for one, other in combinations(range(len(weights)), 2):
        apart = low = high = 0.0
        for each in iterations:
            if not (each.backlogged[one] and each.backlogged[other]):
                apart = low = high = 0.0
                continue
            apart += each.served[one] / weights[one] - each.served[other] / weights[other]
            low, high = min(low, apart), max(high, apart)
            found = max(high - low, found or 0.0)
    return found


def longest_wait(requests: Sequence[RequestRecord], end: float) -> float:
    """The longest that a request waited to be admitted; who never was waited until its end, or `end`."""

    def left(each: RequestRecord) -> float:
        if each.admit_ts is not None:
            return each.admit_ts
        return end if each.finish_ts is None else each.finish_ts

    return max((left(each) - each.arrival_ts for each in requests), default=0.0)


def longest_overtaking(requests: Sequence[RequestRecord]) -> float:
    """By how many seconds, at most, a request had come later than one of the same tenant that it was admitted
    before. 0: first come, first served."""
    most = 0.0
    for own in _by_tenant(requests).values():
        latest = -math.inf  # arrival of those admitted so far
        for admitted, arrived in sorted((each.admit_ts, each.arrival_ts) for each in own if each.admit_ts):
            assert admitted is not None
            most = max(most, latest - arrived)
            latest = max(latest, arrived)
    return most


def late_entries(requests: Sequence[RequestRecord], every: int) -> float:
    """How close waiting came to its bound under overload: 1 is all of it, above it was broken.

    The bound: a turn that has missed its first token's promise enters before more than `every` x (n + 1)
    others of its tenant have; n: turns of the tenant that were in line with it until then. However long the
    overload lasts and whatever comes later, that is a finite wait at the tenant's share. (Relegation lets one
    late turn in for each `every` that enter.)
    """
    most = 0.0
    for own in _by_tenant(requests).values():
        arrivals = sorted(each.arrival_ts for each in own)
        admits = sorted(each.admit_ts for each in own if each.admit_ts is not None)
        ends = sorted(each.finish_ts for each in own if each.admit_ts is None and each.finish_ts is not None)
        for each in own:
            late = each.arrival_ts + each.slo.ttft
            if each.admit_ts is None or each.admit_ts <= late:
                continue
            entered = bisect_left(admits, each.admit_ts) - bisect_right(admits, late)
            gone = bisect_right(admits, each.arrival_ts) + bisect_right(ends, each.arrival_ts)
            others = bisect_right(arrivals, late) - gone - 1
            most = max(most, entered / (every * (others + 1)))
    return most


def _by_tenant(requests: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    found: dict[str, list[RequestRecord]] = {}
    for each in requests:
        found.setdefault(each.tenant, []).append(each)
    return found
