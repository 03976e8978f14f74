"""What a part of the check found, and the whole of it, as written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from agentserve.bench.report import Row


class Check(msgspec.Struct, frozen=True):
    """Something that must be so. `said`: figures, or what is wrong."""

    name: str
    passed: bool
    said: str = ""


class Part(msgspec.Struct, frozen=True):
    """One part. `error`: why it did not come to its end; what it found until then is there, unless it took
    too long."""

    name: str
    rows: Sequence[Row] = ()
    checks: Sequence[Check] = ()
    notes: Sequence[str] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.error and all(check.passed for check in self.checks)


class GpuReport(msgspec.Struct, frozen=True):
    """`gpu-KIND.json`. `benchmark` is "gpu-KIND"."""

    benchmark: str
    command: str
    device: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    parts: Sequence[Part]
