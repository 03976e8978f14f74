"""What each tenant has done, in `/metrics`, which admins alone see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

MOST_NAMES = 100  # of tenants; the others are counted together
OTHERS = "(others)"  # no tenant can be called so
_COUNTS = (
    ("requests", "Requests of a tenant"),
    ("refused", "Requests and turns refused by a tenant's limits"),
    ("turns", "Turns of a tenant"),
    ("prompt_tokens", "Prompt tokens of a tenant's turns"),
    ("generated_tokens", "Tokens generated for a tenant"),
)


class TenantMetrics(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows: dict[str, list[int]] = {}
        registry.register(self)

    def set(self, counts: Mapping[str, tuple[int, ...]]) -> None:
        """By tenant, in the order of their first request: as many numbers as there are counts."""
        self._rows = {}
        for place, (tenant, numbers) in enumerate(counts.items()):
            row = self._rows.setdefault(tenant if place < MOST_NAMES else OTHERS, [0] * len(_COUNTS))
            for index, number in enumerate(numbers):
                row[index] += number

    def collect(self) -> Iterator[CounterMetricFamily]:
        for index, (name, told) in enumerate(_COUNTS):
            family = CounterMetricFamily(f"agentserve_tenant_{name}", told, labels=["tenant"])
            for tenant, row in self._rows.items():
                family.add_metric([tenant], row[index])
            yield family
