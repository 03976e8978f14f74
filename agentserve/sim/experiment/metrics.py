"""What records come to. Pure functions; definitions stand in each one's words.

Percentiles are by linear interpolation. A figure of nothing is None, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentserve.sim.experiment.record import Pace, RequestRecord, Status
from agentserve.sim.traces.record import percentile


class Spread(msgspec.Struct, frozen=True):
    p50: float
    p95: float
    p99: float


class Figures(msgspec.Struct, frozen=True):
    """A run's figures. Latencies in seconds, of requests that ended well; rates over the whole span, from the
    first arrival to the last end; shares of all requests, whatever became of them."""

    requests: int
    seconds: float
    ttft: Spread | None
    tpot: Spread | None
    tbt_p99: float | None
    tokens_per_second: float  # generated
    goodput: float  # requests that kept both promises, per second
    attainment: float  # these, of all requests: rejected, aborted and timed-out ones count
    attainment_by_gaps: float  # the same by each form of the promise, whichever was given
    attainment_by_deadlines: float
    oom_rate: float
    rejection_rate: float
    abandon_rate: float  # aborted or timed out
    hit_rate: float  # prompt tokens found, of all prompt tokens
    preemptions: int


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(percentile(values, 0.5), percentile(values, 0.95), percentile(values, 0.99))


def tpot(request: RequestRecord) -> float | None:
    """Seconds per token after the first: (last - first) / (tokens - 1)."""
    marks = request.every_token_ts
    return None if len(marks) < 2 else (marks[-1] - marks[0]) / (len(marks) - 1)


def met(request: RequestRecord) -> bool:
    """Joint SLO: it ended well, its first token was in time, and so were the others, as was promised."""
    return even(request) if request.slo.pace is Pace.GAPS else in_time(request)


def even(request: RequestRecord) -> bool:
    """Its first token was in time, and so was the 99th percentile of its gaps."""
    ttft = request.ttft
    if request.status is not Status.OK or ttft is None or ttft > request.slo.ttft:
        return False
    return percentile(request.gaps, 0.99) <= request.slo.tbt


def in_time(request: RequestRecord) -> bool:
    """Every token was there by its deadline: token i (from 0) by arrival + TTFT + i x TBT. Who was early may
    pause: what a reader at that pace would not notice. A request may keep this and have long gaps, or the
    reverse."""
    first, pace = request.arrival_ts + request.slo.ttft, request.slo.tbt
    return (
        request.status is Status.OK
        and bool(request.every_token_ts)
        and all(at <= first + pace * number for number, at in enumerate(request.every_token_ts))
    )


def span(requests: Sequence[RequestRecord]) -> float:
    """From the first arrival to the last end, in seconds."""
    began = min((request.arrival_ts for request in requests), default=0.0)
    ends = [request.finish_ts for request in requests if request.finish_ts is not None]
    return max(ends, default=began) - began


def figures(requests: Sequence[RequestRecord]) -> Figures:
    good = [request for request in requests if request.status is Status.OK]
    seconds = span(requests)
    gaps = [gap for request in good for gap in request.gaps]
    kept = sum(met(request) for request in requests)
    prompts = sum(request.prompt_tokens for request in good)
    return Figures(
        requests=len(requests),
        seconds=seconds,
        ttft=spread([request.ttft for request in good if request.ttft is not None]),
        tpot=spread([each for request in good if (each := tpot(request)) is not None]),
        tbt_p99=percentile(gaps, 0.99) if gaps else None,
        tokens_per_second=_rate(sum(len(request.every_token_ts) for request in good), seconds),
        goodput=_rate(kept, seconds),
        attainment=_share(kept, len(requests)),
        attainment_by_gaps=_share(sum(map(even, requests)), len(requests)),
        attainment_by_deadlines=_share(sum(map(in_time, requests)), len(requests)),
        oom_rate=_of(requests, Status.OOM),
        rejection_rate=_of(requests, Status.REJECTED),
        abandon_rate=_of(requests, Status.ABORTED, Status.TIMEOUT),
        hit_rate=_share(sum(request.prefix_hit_tokens for request in good), prompts),
        preemptions=sum(request.preemption_count for request in requests),
    )


def _of(requests: Sequence[RequestRecord], *kinds: Status) -> float:
    return _share(sum(request.status in kinds for request in requests), len(requests))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
