"""Which policy orders turns, and its numbers."""

from __future__ import annotations

import math

import msgspec

from agentserve.core.scheduling.feedback import FeedbackSettings

DEFAULT_POLICY = "fair-resumes"


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    policy: str = DEFAULT_POLICY  # a name in scheduling/registry.py
    weights: dict[str, float] = {}  # share of a tenant beside others, above 0; 1 for who is not named
    safety: float = 1.2  # steps count as so many times as long as predicted, where deadlines are kept
    feedback: FeedbackSettings = FeedbackSettings()
    memory_charge: float = 0.0  # tokens of input charged per token held and second
    quantum: float = 512.0  # tokens per round of a tenant of weight 1

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"weight of tenant {tenant!r}: expected above 0, got {weight}")
        if not 1 <= self.safety < math.inf:
            raise ValueError(f"safety: expected at least 1, got {self.safety}")
        if not 0 <= self.memory_charge < math.inf:
            raise ValueError(f"memory_charge: expected at least 0, got {self.memory_charge}")
        if not 0 < self.quantum < math.inf:
            raise ValueError(f"quantum: expected above 0, got {self.quantum}")

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)
