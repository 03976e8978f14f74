"""What each tenant has done, in `/metrics`, which admins alone see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from agentserve.messages import PromiseCounts

MOST_NAMES = 100  # of tenants; the others are counted together
OTHERS = "(others)"  # no tenant can be called so
_COUNTS = (
    ("requests", "Requests of a tenant"),
    ("refused", "Requests and turns refused by a tenant's limits"),
    ("turns", "Turns of a tenant"),
    ("prompt_tokens", "Prompt tokens of a tenant's turns"),
    ("generated_tokens", "Tokens generated for a tenant"),
)


@dataclass(frozen=True, slots=True)
class PromiseTally:
    """What became of a tenant's promises."""

    kept: Mapping[str, int]  # by kind, as is `missed`
    missed: Mapping[str, int]
    relegated: int
    shed: int


class TenantMetrics(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows: dict[str, list[int]] = {}
        self._promises: dict[tuple[str, str, str], int] = {}  # by tenant, kind and outcome
        self._turns: dict[tuple[str, str], int] = {}  # by tenant and what was done to them
        registry.register(self)

    def set(self, counts: Mapping[str, tuple[int, ...]]) -> None:
        """By tenant, in the order of their first request: as many numbers as there are counts."""
        self._rows = {}
        for place, (tenant, numbers) in enumerate(counts.items()):
            row = self._rows.setdefault(tenant if place < MOST_NAMES else OTHERS, [0] * len(_COUNTS))
            for index, number in enumerate(numbers):
                row[index] += number

    def set_promises(self, tallies: Mapping[str, PromiseTally]) -> None:
        """By tenant, in the order of their first request."""
        self._promises, self._turns = {}, {}
        for place, (tenant, tally) in enumerate(tallies.items()):
            name = tenant if place < MOST_NAMES else OTHERS
            for outcome, counts in (("kept", tally.kept), ("missed", tally.missed)):
                for kind, count in counts.items():
                    key = name, kind, outcome
                    self._promises[key] = self._promises.get(key, 0) + count
            for done, count in (("relegated", tally.relegated), ("shed", tally.shed)):
                if count:
                    self._turns[name, done] = self._turns.get((name, done), 0) + count

    def collect(self) -> Iterator[CounterMetricFamily]:
        for index, (name, told) in enumerate(_COUNTS):
            family = CounterMetricFamily(f"agentserve_tenant_{name}", told, labels=["tenant"])
            for tenant, row in self._rows.items():
                family.add_metric([tenant], row[index])
            yield family
        told = "Promises for a tenant's turns that were kept, and that were not"
        family = CounterMetricFamily("agentserve_tenant_slo", told, labels=["tenant", "kind", "outcome"])
        for labels, count in self._promises.items():
            family.add_metric(labels, count)
        yield family
        told = (
            "A tenant's turns that went behind those that could be in time, or were not begun for their queue"
        )
        family = CounterMetricFamily("agentserve_tenant_slo_turns", told, labels=["tenant", "done"])
        for names, count in self._turns.items():
            family.add_metric(names, count)
        yield family


class PromiseMetrics(Collector):
    """What workers' schedulers did for promises; a worker that is replaced begins anew."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._views: Sequence[PromiseCounts] = ()
        registry.register(self)

    def set(self, views: Sequence[PromiseCounts]) -> None:
        self._views = views

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, told in (
            ("relegated", "Turns that went behind those that could still be in time"),
            ("shed", "Turns that were not begun for their queue"),
            ("unattainable", "Deadlines of tokens that no step could keep"),
            ("overruled", "Steps not cut for deadlines, as prompts had got too little"),
        ):
            family = GaugeMetricFamily(f"agentserve_engine_slo_{name}", told)
            family.add_metric([], sum(getattr(view, name) for view in self._views))
            yield family
