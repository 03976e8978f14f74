"""The worker process: build the engine, say Hello, run the loop, leave without a trace.

Started with a WorkerSpec as JSON on stdin; `agentserve.server.workers.worker` is the entry point. It never
outlives the API process: the kernel kills it when its parent dies (Linux), and the end of the
socket ends it elsewhere.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentserve.clock import WallClock
from agentserve.core.cost import StepCost
from agentserve.core.market import TierSetup
from agentserve.core.ports import Executor
from agentserve.core.record import RECORD_VERSION, Opened, encode_entry
from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.core.timing.tally import EVERYTHING, Attention
from agentserve.heap import freeze
from agentserve.messages import Hello, RunCounts, StartFailed
from agentserve.records.series import iterations_writer
from agentserve.records.writer import Bounds
from agentserve.server.workers.exchange import Exchange, Tiering
from agentserve.server.workers.iterations import IterationLog, step_features
from agentserve.server.workers.link import WorkerLink
from agentserve.server.workers.loop import Core, WorkerLoop
from agentserve.server.workers.parent import die_with
from agentserve.server.workers.recorder import Recorder
from agentserve.server.workers.spec import WorkerSpec
from agentserve.types import KVGroup

log = logging.getLogger("agentserve.worker")


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What a builder hands to the worker. `config` and `cost` are the core's, for the recorded log."""

    core: Core
    executor: Executor
    hello: Hello
    config: msgspec.Struct
    groups: tuple[KVGroup, ...]
    pages: tuple[int, ...]
    cost: StepCost
    tiering: Tiering | None = None  # the same core, and who moves its KV between tiers
    tiers: TierSetup | None = None  # what its tiers were built from, for the recorded log
    when_computing: Callable[[Callable[[], None]], None] | None = None  # of the executor, if it has that
    runs: Callable[[], RunCounts] | None = None  # of the executor, where decode steps are recorded
    fingerprint: Fingerprint | None = None  # whose steps these are, for recordings
    attention: Attention = EVERYTHING  # how much of a context the model's layers attend to
    release: Callable[[], None] | None = None  # ends what computes with it, when the loop is over


EngineBuilder = Callable[[WorkerSpec], BuiltEngine]


def main(build: EngineBuilder) -> int:
    """Run one worker to its end; the exit status.

    A `ValueError`, `OSError` or `MemoryError` out of `build` is told to the API process in one line.
    """
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec)
    die_with(spec.parent)
    logging.basicConfig(
        level=spec.log_level.upper(),
        format=f"%(asctime)s worker {spec.index} %(levelname)s %(message)s",
    )
    link = WorkerLink.connect(Path(spec.socket))
    try:
        built = build(spec)
        recorder = _recorder(spec, built)
    except Exception as error:
        if not isinstance(error, ValueError | OSError | MemoryError):
            log.exception("the engine could not be built")
        link.send(StartFailed(_one_line(error)))
        _drain_outbox(link)
        return 1
    clock = WallClock()
    exchange = Exchange(built.tiering, clock, recorder) if built.tiering is not None else None
    iterations = _iterations(spec, built, clock)
    loop = WorkerLoop(
        built.core, built.executor, link, clock=clock, recorder=recorder, exchange=exchange,
        iterations=iterations, when_computing=built.when_computing if spec.overlap else None,
        runs=built.runs,
    )  # fmt: skip
    link.send(built.hello)
    freeze()
    try:
        loop.run()
    finally:
        recorder.close()
        if iterations is not None:
            iterations.close()
    _drain_outbox(link)
    link.close()
    if built.release is not None:
        built.release()
    return 0


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def _recorder(spec: WorkerSpec, built: BuiltEngine) -> Recorder:
    if spec.record is None:
        return Recorder(None)
    file = open(spec.record, "wb")  # noqa: SIM115  (closed by the recorder)
    config = msgspec.msgpack.encode(built.config)
    opened = Opened(RECORD_VERSION, config, built.groups, built.pages, built.cost, built.tiers)
    file.write(encode_entry(opened))
    return Recorder(file)


def _iterations(spec: WorkerSpec, built: BuiltEngine, clock: WallClock) -> IterationLog | None:
    if spec.recording is None:
        return None
    writer = iterations_writer(
        Path(spec.recording),
        Bounds(spec.recording_bytes, spec.recording_files),
        built.hello,
        spec.model,
        clock,
        worker=spec.index,
        groups=[group.name for group in built.groups],
        step_tokens=spec.max_batched_tokens,
        fingerprint=built.fingerprint,
    )
    return IterationLog(writer, step_features(built.attention))


def _drain_outbox(link: WorkerLink, seconds: float = 2.0) -> None:
    """Give the last events a moment to leave; the API process may be gone."""
    with suppress(OSError):
        deadline = WallClock().now() + seconds
        while link.unsent and not link.closed and (left := deadline - WallClock().now()) > 0:
            link.wait_writable(left)
