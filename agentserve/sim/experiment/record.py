"""What is recorded: a line for each request, and one for each iteration. Times are of the run's clock."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from agentserve.types import Slo


class Status(Enum):
    """How a request ended."""

    OK = "ok"
    REJECTED = "rejected"  # the server would not take it
    OOM = "oom"  # it can never fit the KV pool
    ABORTED = "aborted"  # it, or the session that it belongs to, was given up
    TIMEOUT = "timeout"  # its client's patience ended
    ERROR = "error"


class Pace(Enum):
    """What is promised of the tokens after the first."""

    GAPS = "gaps"  # the 99th percentile of the gaps between a request's tokens
    DEADLINES = "deadlines"  # token i by arrival + TTFT + i x TBT: who was early may pause


class Promise(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's SLO in seconds: to its first token, and between tokens, in the form of `pace`."""

    ttft: float
    tbt: float
    pace: Pace = Pace.GAPS

    @property
    def slo(self) -> Slo:
        """As the scheduler is told it."""
        if self.pace is Pace.GAPS:
            return Slo(ttft=self.ttft, gap=self.tbt)
        return Slo(ttft=self.ttft, tbt=self.tbt)


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request as its client saw it. `arrival_ts` is when it was meant to arrive, however late anybody was
    in taking it: a slow server makes nobody come later."""

    session: str
    turn: int
    tenant: str
    kind: str
    arrival_ts: float
    admit_ts: float | None
    first_token_ts: float | None
    every_token_ts: tuple[float, ...]
    finish_ts: float | None
    prompt_tokens: int
    prefix_hit_tokens: int
    computed_tokens: int  # rows that were run for it, recomputation included
    preemption_count: int
    status: Status
    slo: Promise
    why: str = ""  # of a status that is not ok

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_ts is None else self.first_token_ts - self.arrival_ts

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.every_token_ts))


class IterationRecord(msgspec.Struct, frozen=True, gc=False):
    """One step. Page counts are of the tightest KV group."""

    start_ts: float
    iteration_ms: float  # of the device
    predicted_ms: float
    host_ms: float  # of the scheduler, in which the device stood still
    scheduled_tokens: int
    prefill_tokens: int
    rows: int
    pages_used: int
    pages_cached: int
    pages_free: int
    swapped_in: int  # bytes that arrived on the device since the iteration before
    swapped_out: int
    waiting: int  # turns that have arrived and were not admitted
    limits: tuple[str, ...]  # what bound, each once, in order of appearance
    served: tuple[float, ...]  # weighted tokens of work by tenant, in the order of the run's tenants
    backlogged: tuple[bool, ...]  # by tenant: it has turns that wait
    active: tuple[bool, ...]  # by tenant: it has turns that wait or run


Line = TypeVar("Line", bound=msgspec.Struct)


def write_lines(lines: Iterable[msgspec.Struct], path: Path) -> None:
    """JSON lines; whoever reads meanwhile sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(path.suffix + ".part")
    encoder = msgspec.json.Encoder()
    with beside.open("wb") as file:
        for line in lines:
            file.write(encoder.encode(line) + b"\n")
    beside.replace(path)


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Raises msgspec.MsgspecError or OSError."""
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]
