"""The step log: what each iteration was, took, and was predicted to take. Lines of JSON.

The first line of a file is a `LogHeader`, each other one a `StepRecord`. A line that was cut or damaged costs
itself. Who writes or reads the file does the I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from agentserve.core.plan import Plan, StepResult
from agentserve.core.timing.features import StepLoad
from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.core.timing.fitting import Quality, Timed, judged
from agentserve.messages import GroupPages, WorkerView
from tiering.types import Move

LOG_VERSION = 1
LIMITS = ("tokens", "pages", "time", "seats", "gate")
"""Of a plan's reasons those that are limits; the others say what a turn waits for."""


class LogHeader(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="log"):
    version: int
    fingerprint: Fingerprint
    groups: tuple[str, ...]  # names of the KV groups, in the order of `KV_pages`
    page_size: int
    step_tokens: int  # the most that a step may have


class Swapped(msgspec.Struct, frozen=True, rename={"into": "in", "out_of": "out"}):
    """Bytes of KV that were moved into and out of the device since the step before."""

    into: int = 0
    out_of: int = 0


class StepRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step", rename={"kv_pages": "KV_pages"}
):
    """One iteration. Times are of the executor: copies, forward pass and sampling, without idling."""

    step: int
    at: float  # when it had ended: seconds on the worker's monotonic clock
    scheduled_tokens: int
    iteration_ms: float
    predicted_ms: float  # 0: nothing was known of this machine
    bound_ms: float  # what it was hardly to exceed
    kv_pages: tuple[GroupPages, ...]  # after it, per KV group
    swapped_bytes: Swapped
    binding_limit: str  # the first limit that kept the step from being larger; empty: none did
    limits: dict[str, int]  # how many turns each limit cut short or left out
    preempted: int
    running: int
    waiting: int
    load: StepLoad


Line = LogHeader | StepRecord

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    return _encoder.encode(line) + b"\n"


class Recording:
    """Makes records of steps; remembers what was moved before each."""

    def __init__(self) -> None:
        self._moved = Swapped()

    def record(
        self, plan: Plan, load: StepLoad, result: StepResult, view: WorkerView, now: float
    ) -> StepRecord:
        """view: of the worker after the step."""
        limits: dict[str, int] = {}
        for _, reason in plan.reasons:
            if reason in LIMITS:
                limits[reason] = limits.get(reason, 0) + 1
        moved, before = _moved(view), self._moved
        self._moved = moved
        return StepRecord(
            step=plan.step,
            at=round(now, 6),
            scheduled_tokens=plan.tokens,
            iteration_ms=round(result.seconds * 1e3, 4),
            predicted_ms=round(plan.predicted_seconds * 1e3, 4),
            bound_ms=round(plan.bound_seconds * 1e3, 4),
            kv_pages=view.groups,
            swapped_bytes=Swapped(moved.into - before.into, moved.out_of - before.out_of),
            binding_limit=next(iter(limits), ""),
            limits=limits,
            preempted=sum(reason == "preempted" for _, reason in plan.reasons),
            running=view.running,
            waiting=view.waiting,
            load=load,
        )


def _moved(view: WorkerView) -> Swapped:
    """Since the worker began."""
    tiers = view.tiers
    if tiers is None:
        return Swapped()
    blocks = {move: tiers.moved.get(move.value, (0, 0.0))[0] for move in (Move.LOAD, Move.FETCH, Move.SAVE)}
    return Swapped(
        (blocks[Move.LOAD] + blocks[Move.FETCH]) * tiers.block_bytes, blocks[Move.SAVE] * tiers.block_bytes
    )


class Log(msgspec.Struct, frozen=True):
    """What was read of one file."""

    header: LogHeader
    steps: tuple[StepRecord, ...]
    damaged: int  # lines that could not be read, a last one that was cut among them

    @property
    def timed(self) -> list[Timed]:
        return [Timed(step.load, step.iteration_ms / 1e3) for step in self.steps]


def read_log(data: bytes) -> Log:
    """Raises ValueError, one line, if it does not begin as a step log of this version does."""
    lines = data.split(b"\n")
    try:
        header = _decoder.decode(lines[0])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a step log: {error}") from None
    if not isinstance(header, LogHeader):
        raise ValueError("not a step log: its first line says nothing of the machine")
    if header.version != LOG_VERSION:
        raise ValueError(f"a step log of version {header.version}; this is version {LOG_VERSION}")
    steps, damaged = _records(lines[1:])
    return Log(header, tuple(steps), damaged)


def _records(lines: Iterable[bytes]) -> tuple[list[StepRecord], int]:
    steps, damaged = [], 0
    for line in lines:
        if not line:
            continue
        try:
            record = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            damaged += 1
            continue
        if isinstance(record, StepRecord):
            steps.append(record)
    return steps, damaged


def as_they_ran(logs: Sequence[Log]) -> Quality | None:
    """How well steps were predicted when they ran; None if nothing was."""
    steps = [step for log in logs for step in log.steps if step.predicted_ms > 0 and step.iteration_ms > 0]
    if not steps:
        return None
    predicted, bounds, took = np.array(
        [(step.predicted_ms, step.bound_ms, step.iteration_ms) for step in steps]
    ).T
    return judged(predicted, bounds, took)


def same_machine(logs: Sequence[Log]) -> Fingerprint:
    """Whose steps these are. Raises ValueError, one line, if they are of several machines or settings."""
    first = logs[0].header.fingerprint
    for log in logs[1:]:
        differ = first.differences(log.header.fingerprint)
        if differ:
            raise ValueError(f"the logs are not of one machine and model: {'; '.join(differ)}")
    return first
