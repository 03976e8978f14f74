"""What a run was short of: compute, KV, the link below it, or the host. Pure, from what was recorded.

Shares are of the time in which sessions arrive, but for the first tenth of them: before, pools fill, and
afterwards a run drains. Those of links are of the whole run. The rules are
those of the experiment's definition; where several hold, the one that explains the others comes first: a
link that is full makes turns wait for KV, and a scheduler that is slow leaves the device idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from agentserve.sim.experiment.record import IterationRecord, RequestRecord

RAMP = 0.1  # of the sessions, the first ones: pools fill
BUSY = 0.95  # of the time: the device is the limit
BOUND = 0.5  # of the iterations, by tokens or time
REFUSED = 0.2  # of the iterations, in which a turn lacked pages
PREEMPTED = 0.05  # preemptions per finished request
LINK = 0.7  # of the time, in which a link copied
HELD = 0.2  # of the iterations, in which a turn waited for a copy; or of the time, with nothing else to do
HOST = 0.1  # of an iteration, in which the device waited for the scheduler

FOR_PAGES = frozenset({"pages", "gate", "preempted", "a preemption in this step"})
FOR_WORK = frozenset({"tokens", "time"})
FOR_COPIES = "loading"


class Cause(Enum):
    COMPUTE = "compute"
    KV = "KV"
    LINK = "swap bandwidth"
    HOST = "host"
    NONE = "none of these"


class Evidence(msgspec.Struct, frozen=True):
    """All shares of a run, whatever they say."""

    device_busy: float
    bound_by_work: float  # iterations that tokens or time bound
    lacked_pages: float  # iterations in which a turn lacked pages
    preemptions_per_request: float
    link_busy: dict[str, float]  # by link
    held_by_copies: float  # iterations in which a turn waited for a copy
    stalled: float  # of the time: nothing could run before a copy had ended
    host: float  # of the time of iterations

    @property
    def cause(self) -> Cause:
        full = max(self.link_busy.values(), default=0.0) >= LINK
        if self.stalled >= HELD or (full and self.held_by_copies >= HELD):
            return Cause.LINK
        if self.host > HOST:
            return Cause.HOST
        if self.lacked_pages >= REFUSED or self.preemptions_per_request > PREEMPTED:
            return Cause.KV
        if self.device_busy >= BUSY or self.bound_by_work >= BOUND:
            return Cause.COMPUTE
        return Cause.NONE


def evidence(
    requests: Sequence[RequestRecord],
    iterations: Sequence[IterationRecord],
    copying: dict[str, float],
    stalled: float,
) -> Evidence:
    """copying: seconds by link; stalled: seconds. Both of the whole run."""
    firsts = sorted(each.arrival_ts for each in requests if each.turn == 1)
    began = firsts[int(RAMP * len(firsts))] if firsts else 0.0
    until = firsts[-1] if firsts else 0.0
    kept = [each for each in iterations if began <= each.start_ts <= until]
    span = max(until - began, sum(each.iteration_ms + each.host_ms for each in kept) / 1e3)
    busy = sum(each.iteration_ms for each in kept) / 1e3
    host = sum(each.host_ms for each in kept) / 1e3
    whole = max((each.start_ts + each.iteration_ms / 1e3 for each in iterations), default=0.0)
    count = len(kept)
    return Evidence(
        device_busy=_share(busy, span),
        bound_by_work=_share(sum(not FOR_WORK.isdisjoint(each.limits) for each in kept), count),
        lacked_pages=_share(sum(not FOR_PAGES.isdisjoint(each.limits) for each in kept), count),
        preemptions_per_request=_share(sum(each.preemption_count for each in requests), len(requests)),
        link_busy={link: _share(seconds, whole) for link, seconds in copying.items()},
        held_by_copies=_share(sum(FOR_COPIES in each.limits for each in kept), count),
        stalled=_share(stalled, whole),
        host=_share(host, busy + host),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
