"""How long tenants' requests took and what became of them, in `/metrics`, which admins alone see.

The first `MOST_NAMES` tenants have labels of their own, the others share one. Bounds are chosen for agents:
a turn behind a tool result begins within a second where its KV is there and within tens of seconds where it
is not, and a promise about tokens is usually 50, 100 or 250 ms. Times count from a request's arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from agentserve.messages import PreemptionCounts
from agentserve.tenant_metrics import MOST_NAMES, OTHERS

TO_FIRST = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 300)  # seconds
BETWEEN = (0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2, 5, 15)
MOST_REASONS = 64  # label values; they come from the code, and the others share one
OTHER = "(other)"


class Buckets:
    """Values counted by bounds, each with those up to it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def show(self, family: HistogramMetricFamily, tenant: str) -> None:
        total, shown = 0, []
        for bound, count in zip((*map(floatToGoString, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            shown.append((bound, total))
        family.add_metric([tenant], shown, self._sum)


class TenantTurns:
    """One tenant's row."""

    def __init__(self) -> None:
        self.ttft = Buckets(TO_FIRST)
        self.queue = Buckets(TO_FIRST)
        self.tbt = Buckets(BETWEEN)
        self.ended: dict[str, int] = {}  # by status
        self.cached_tokens = 0
        self.preemptions = 0


class RequestMetrics(Collector):
    """All methods are cheap and never raise."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows: dict[str, TenantTurns] = {}
        self._rejected: dict[str, int] = {}
        self._preempted: dict[tuple[str, str], int] = {}  # by why and by way
        self._moved = PreemptionCounts()
        self._lost_turns = 0
        self._lost: dict[str, int] = {}
        registry.register(self)

    def of(self, tenant: str) -> TenantTurns:
        if tenant not in self._rows and len(self._rows) >= MOST_NAMES:
            tenant = OTHERS
        return self._rows.setdefault(tenant, TenantTurns())

    def rejected(self, reason: str) -> None:
        """A request for a turn was refused, whoever sent it."""
        _count(self._rejected, reason)

    def worker_lost(self) -> None:
        """A turn lost its seat with its worker, and goes on at another one."""
        self._lost_turns += 1

    def set_preemptions(self, counts: Iterable[PreemptionCounts]) -> None:
        """counts: of all workers, over all that ran in each place. Totals never fall."""
        told = list(counts)
        made: dict[tuple[str, str], int] = {}
        for each in told:
            for why, ways in each.made.items():
                for way, number in ways.items():
                    made[why, way] = made.get((why, way), 0) + number
        for name, number in made.items():
            self._preempted[name] = max(number, self._preempted.get(name, 0))
        before = self._moved
        self._moved = PreemptionCounts(
            swapped=max(before.swapped, sum(each.swapped for each in told)),
            returned=max(before.returned, sum(each.returned for each in told)),
            asked=max(before.asked, sum(each.asked for each in told)),
            migrated=max(before.migrated, sum(each.migrated for each in told)),
        )

    def lost(self, series: str, lines: int) -> None:
        """So many lines of the recording could not be written, since the start."""
        self._lost[series] = max(lines, self._lost.get(series, 0))

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        yield self._times("ttft_seconds", "Arrival to first token, of a tenant's turns", "ttft")
        yield self._times("queue_seconds", "Arrival to admission, of a tenant's turns", "queue")
        yield self._times("tbt_seconds", "Gaps between the tokens of a tenant's turns", "tbt")
        ended = _family("tenant_ended", "A tenant's turns and refused requests", "tenant", "status")
        cached = _family("tenant_cached_tokens", "Prompt tokens of a tenant that cost nothing", "tenant")
        preempted = _family("tenant_preemptions", "Preemptions of a tenant's turns", "tenant")
        for tenant, row in self._rows.items():
            for status, number in row.ended.items():
                ended.add_metric([tenant, status], number)
            cached.add_metric([tenant], row.cached_tokens)
            preempted.add_metric([tenant], row.preemptions)
        yield from (ended, cached, preempted)
        yield from self._preemptions()
        for name, told, label, counts in (
            ("rejections", "Requests for turns that were refused, by reason", "reason", self._rejected),
            ("record_lines_lost", "Lines missing in the recording, by file", "series", self._lost),
        ):
            family = _family(name, told, label)
            for value, number in counts.items():
                family.add_metric([value], number)
            yield family

    def _preemptions(self) -> Iterator[CounterMetricFamily]:
        made = _family(
            "preemption_reasons", "Seats that running turns lost: why, and which way", "reason", "way"
        )
        for (why, way), number in self._preempted.items():
            made.add_metric([why, way], number)
        made.add_metric(["worker_lost", "recompute"], self._lost_turns)
        blocks = _family("preemption_blocks", "Blocks moved out for victims, and brought back", "what")
        turns = _family(
            "preemption_moves", "Victims that another worker was wanted for, and that went", "what"
        )
        for family, names in ((blocks, ("swapped", "returned")), (turns, ("asked", "migrated"))):
            for name in names:
                family.add_metric([name], getattr(self._moved, name))
        yield from (made, blocks, turns)

    def _times(self, name: str, told: str, row: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"agentserve_tenant_{name}", told, labels=["tenant"])
        for tenant, turns in self._rows.items():
            getattr(turns, row).show(family, tenant)
        return family


def _family(name: str, told: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"agentserve_{name}", told, labels=labels)


def _count(counts: dict[str, int], reason: str) -> None:
    if reason not in counts and len(counts) >= MOST_REASONS:
        reason = OTHER
    counts[reason] = counts.get(reason, 0) + 1
