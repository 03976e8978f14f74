"""Peers that are libraries: each in its own Python beside our engine in ours, on the same GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agentserve.bench.compare.child import Child, peer_environment
from agentserve.bench.compare.contest import Contestant
from agentserve.bench.compare.drivers import loop
from agentserve.bench.compare.piped import Piped
from agentserve.bench.compare.plan import Scenario
from agentserve.bench.compare.settings import Settings
from agentserve.server.workers.supervisor import worker_environment

GGUF = "smollm2-135m-instruct-q4_1.gguf"
ROWS, POSITIONS = 8, 4096  # the most of any scenario
DECODE_STEPS = 64
SCENARIOS = (
    Scenario("decode", 1, 64, DECODE_STEPS),
    Scenario("decode", 1, 3500, DECODE_STEPS),
    Scenario("decode", 8, 64, DECODE_STEPS),
    Scenario("decode", 8, 2000, DECODE_STEPS // 2),
    Scenario("prefill", 1, 400),
    Scenario("prefill", 1, 2000),
    Scenario("prefill", 1, 3500),
)


@contextmanager
def contestants(name: str, settings: Settings, logs: Path) -> Iterator[Sequence[Contestant]]:
    """The peer `name`, then ours: one for each kind of activations if 8-bit ones are asked for."""
    python = settings.needed(f"{name}/bin/python")
    model = settings.model_or(GGUF)
    with ExitStack() as running:

        def start(
            who: str, command: Sequence[str], environment: Mapping[str, str], **orders: object
        ) -> Contestant:
            child = running.enter_context(Child(who, command, logs, environment, piped=True))
            return Piped(child, {"model": model, **orders}, settings.start_limit, settings.run_limit)

        peer = start(
            name,
            [str(python), "-I", loop.__file__, name],
            peer_environment(),
            threads=settings.threads,
            rows=ROWS,
            positions=POSITIONS,
            kv_gib=settings.kv_gib,
        )
        ours = [
            start(who, [sys.executable, "-P", "-m", f"{__package__}.ours"], worker_environment(), flags=flags)
            for who, flags in variants({**settings.flags, "model": model}, settings).items()
        ]
        yield [peer, *ours]


def variants(flags: Mapping[str, str], settings: Settings) -> dict[str, dict[str, str]]:
    """Our flags by contestant's name."""
    common = {**flags, "device_kv": f"{settings.kv_gib}GiB", "threads": str(settings.threads)}
    if flags.get("activations") == "int8":
        return {
            f"agentserve, {activations} activations": {**common, "activations": activations}
            for activations in ("float", "int8")
        }
    return {"agentserve": common}
