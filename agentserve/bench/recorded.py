"""What a recording comes to. Pure: records in, figures out.

Latencies are of requests that ended well, percentiles by linear interpolation; a figure of nothing is None.
TTFT and queue count from the arrival; TPOT is the time from the first to the last token by the tokens after
the first; TBT is each gap by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from agentserve.records.lines import IterationRecord, RequestRecord, Status
from agentserve.records.reader import Records
from agentserve.sim.experiment.metrics import Spread, spread

WELL = (Status.COMPLETED, Status.LENGTH)


class RequestFigures(msgspec.Struct, frozen=True):
    requests: int
    seconds: float  # from the first arrival to the last end
    statuses: dict[str, int]
    rejections: dict[str, int]  # by reason, what was shed included
    ttft: Spread | None  # seconds
    queue: Spread | None
    tpot: Spread | None
    tbt: Spread | None
    prompt_tokens: int  # of requests that ended well, as are those below
    prefix_hit_tokens: int
    output_tokens: int
    preemptions: int  # of all
    promised: int  # requests to which something was promised, but for those that their clients ended
    kept: int  # those that kept it


class IterationFigures(msgspec.Struct, frozen=True):
    iterations: int
    mean_tokens: float
    milliseconds: Spread | None
    host_share: float  # of their time, what was not the executor's
    binding: dict[str, int]  # how many iterations each limit bound; "" stands for those that none did
    preempted: int
    swapped_in: int  # bytes
    swapped_out: int
    predicted: int  # iterations whose time was predicted
    error: float | None  # mean of |predicted - actual| / actual, of the executor's time
    late: float | None  # share of them that took longer than predicted


def tpot(request: RequestRecord) -> float | None:
    gaps = request.every_token_ts[1:]
    return sum(gaps) / 1e3 / len(gaps) if gaps else None


def of_requests(requests: Sequence[RequestRecord]) -> RequestFigures:
    good = [request for request in requests if request.status in WELL]
    refused = [request for request in requests if request.status in (Status.REJECTED, Status.SHED)]
    promised = [request for request in requests if request.slo_met is not None]
    began = min((request.arrival_ts for request in requests), default=0.0)
    return RequestFigures(
        requests=len(requests),
        seconds=max((request.finish_ts for request in requests), default=began) - began,
        statuses=_counted(request.status.value for request in requests),
        rejections=_counted(request.reason for request in refused),
        ttft=spread([r.first_token_ts - r.arrival_ts for r in good if r.first_token_ts is not None]),
        queue=spread([r.admit_ts - r.arrival_ts for r in good if r.admit_ts is not None]),
        tpot=spread([each for request in good if (each := tpot(request)) is not None]),
        tbt=spread([gap / 1e3 for request in good for gap in request.every_token_ts[1:]]),
        prompt_tokens=sum(request.prompt_tokens for request in good),
        prefix_hit_tokens=sum(request.prefix_hit_tokens or 0 for request in good),
        output_tokens=sum(request.output_tokens for request in good),
        preemptions=sum(request.preemption_count for request in requests),
        promised=len(promised),
        kept=sum(bool(request.slo_met) for request in promised),
    )


def of_iterations(iterations: Sequence[IterationRecord]) -> IterationFigures:
    whole = sum(each.iteration_ms for each in iterations)
    told = [each for each in iterations if each.predicted_ms > 0 and each.model_ms > 0 and not each.failed]
    return IterationFigures(
        iterations=len(iterations),
        mean_tokens=_mean([each.scheduled_tokens for each in iterations]) or 0.0,
        milliseconds=spread([each.iteration_ms for each in iterations]),
        host_share=1 - sum(each.model_ms for each in iterations) / whole if whole else 0.0,
        binding=_counted(each.binding_limit for each in iterations),
        preempted=sum(each.preempted for each in iterations),
        swapped_in=sum(each.swapped_bytes.into for each in iterations),
        swapped_out=sum(each.swapped_bytes.out_of for each in iterations),
        predicted=len(told),
        error=_mean([abs(each.predicted_ms - each.model_ms) / each.model_ms for each in told]),
        late=_mean([each.model_ms > each.predicted_ms for each in told]),
    )


def report(records: Records) -> str:
    """A page of text."""
    lines = [f"of {each}" for each in sorted({f"{o.model}, policy {o.policy}" for o in records.opened})]
    if records.missing or records.damaged:
        lines.append(f"{records.missing} line(s) were never written, {records.damaged} cannot be read")
    if records.requests:
        lines += ["", *_requests(of_requests(records.requests))]
    if records.iterations:
        lines += ["", *_iterations(of_iterations(records.iterations))]
    return "\n".join(lines)


def _requests(found: RequestFigures) -> list[str]:
    rate = found.output_tokens / found.seconds if found.seconds else 0.0
    lines = [
        f"{found.requests} requests in {found.seconds:.1f} s: {_listed(found.statuses)}",
        f"  {found.output_tokens} tokens generated ({rate:.1f}/s), {found.prefix_hit_tokens} of "
        f"{found.prompt_tokens} prompt tokens found, {found.preemptions} preemptions",
    ]
    if found.rejections:
        lines.append(f"  refused for {_listed(found.rejections)}")
    if found.promised:
        lines.append(f"  promises kept by {found.kept} of {found.promised}")
    lines.append(f"  {'':9}{'P50':>10}{'P95':>10}{'P99':>10}")
    return [
        *lines,
        _row("TTFT, s", found.ttft, 1),
        _row("queue, s", found.queue, 1),
        _row("TPOT, ms", found.tpot, 1000),
        _row("TBT, ms", found.tbt, 1000),
    ]


def _iterations(found: IterationFigures) -> list[str]:
    shares = {name or "none": count for name, count in found.binding.items()}
    bound = ", ".join(f"{name} {count / found.iterations:.0%}" for name, count in shares.items())
    lines = [
        f"{found.iterations} iterations of {found.mean_tokens:.1f} tokens on average, "
        f"{found.preempted} preemptions",
        _row("ms", found.milliseconds, 1),
        f"  {found.host_share:.1%} of their time outside the executor; bound by: {bound}",
        f"  {found.swapped_in / 2**20:.1f} MiB swapped in, {found.swapped_out / 2**20:.1f} MiB out",
    ]
    if found.error is not None and found.late is not None:
        off = f"off by {found.error:.1%} on average, {found.late:.1%} took longer"
        lines.append(f"  {found.predicted} predicted: {off}")
    return lines


def _row(name: str, values: Spread | None, scale: float) -> str:
    if values is None:
        return f"  {name:9}{'-':>10}{'-':>10}{'-':>10}"
    return f"  {name:9}" + "".join(f"{value * scale:10.3g}" for value in (values.p50, values.p95, values.p99))


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _counted(names: Iterable[str]) -> dict[str, int]:
    """The most frequent first."""
    return dict(Counter(names).most_common())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
