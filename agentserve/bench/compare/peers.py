"""The peers, and the whole comparison with one of them: from starting the contestants to the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree

from agentserve.bench import report
from agentserve.bench.compare import libraries, llamacpp, openvino, vllm
from agentserve.bench.compare.contest import Contestant, Idle, PeerFailed, measure
from agentserve.bench.compare.plan import Scenario
from agentserve.bench.compare.result import Comparison, ScenarioRatios, Setup, notes
from agentserve.bench.compare.settings import Settings

Started = AbstractContextManager[Sequence[Contestant]]
Start = Callable[[Settings, Path], Started]


@dataclass(frozen=True, slots=True)
class Stage:
    """Scenarios that one start of the contestants serves."""

    start: Start
    scenarios: Sequence[Scenario]


@dataclass(frozen=True, slots=True)
class Peer:
    stages: Sequence[Stage]
    notes: Sequence[str] = field(default=())


PEERS = {
    "vllm": Peer(
        (
            Stage(vllm.contestants, vllm.SCENARIOS),
            Stage(partial(vllm.contestants, chunk=vllm.CHUNK), vllm.CHUNKED),
        ),
        vllm.NOTES,
    ),
    "openvino": Peer(
        (Stage(partial(libraries.contestants, "openvino"), openvino.SCENARIOS),), openvino.NOTES
    ),
    "llamacpp": Peer(
        (Stage(partial(libraries.contestants, "llamacpp"), llamacpp.SCENARIOS),), llamacpp.NOTES
    ),
}


def compare_with(
    name: str,
    settings: Settings,
    *,
    runs: int,
    only: str,
    command: str,
    say: Callable[[ScenarioRatios], None],
) -> Comparison:
    """Run the scenarios of peer `name` whose names contain `only`; `say` hears of each as it is done.

    Raises PeerFailed, whose text names a log file that is then kept.
    """
    peer = PEERS[name]
    rows: list[ScenarioRatios] = []
    setups: list[Setup] = []
    idle = Idle()
    with _logs() as logs:
        for number, stage in enumerate(peer.stages):
            scenarios = [scenario for scenario in stage.scenarios if only in scenario.name]
            if not scenarios:
                continue
            folder = logs / str(number)
            folder.mkdir()
            with stage.start(settings, folder) as contestants:
                rows += measure(contestants, scenarios, runs, idle, say)
                names = [scenario.name for scenario in scenarios]
                first, *others = (contestant.facts for contestant in contestants)
                setups.append(Setup(names, first, others))
    if not rows:
        raise PeerFailed(f"no scenario of {name} has {only!r} in its name")
    cores = idle.cores()
    return Comparison(
        benchmark=f"compare-{name}",
        command=command,
        machine=report.machine(),
        versions=report.versions(),
        setups=setups,
        rows=rows,
        idle_cores=cores,
        notes=[*peer.notes, *notes(rows, cores)],
    )


@contextmanager
def _logs() -> Iterator[Path]:
    """A folder for the contestants' output, gone unless somebody may want to read it."""
    folder = Path(tempfile.mkdtemp(prefix="agentserve-compare-"))
    try:
        yield folder
    except PeerFailed:
        if not any(folder.glob("*/*.log")):  # nothing had been started
            rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise
    rmtree(folder, ignore_errors=True)
