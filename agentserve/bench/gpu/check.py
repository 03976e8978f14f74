"""The whole check of a GPU: every part in a process of its own, within its time; one file, one table."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from agentserve.bench import report
from agentserve.bench.gpu.parts import PARTS
from agentserve.bench.gpu.result import GpuReport, Part
from agentserve.bench.report import Row

INTERPRETER = "interpreter"
_MORE_TIME = 3.0  # what the interpreter gets: nobody times it, and machines that test are busy


def check(
    interpreted: bool,
    told: Callable[[Part], None],
    names: Sequence[str] = tuple(PARTS),
    limits: Mapping[str, float] | None = None,
) -> list[Part]:
    """Every part of `names`, in order. `limits`: seconds, where they are not the parts' own."""
    found = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, ThreadPoolExecutor() as threads:

        def run(name: str) -> Part:
            limit = (limits or {}).get(name, PARTS[name].seconds * (_MORE_TIME if interpreted else 1.0))
            return _run(name, Path(folder), interpreted, limit)

        for together, some in itertools.groupby(names, lambda name: PARTS[name].together):
            side_by_side = together and not interpreted  # interpreters have one core each at most
            for part in threads.map(run, some) if side_by_side else map(run, some):
                told(part)
                found.append(part)
    return found


def _run(name: str, folder: Path, interpreted: bool, limit: float) -> Part:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "agentserve.bench.gpu.parts", name, str(folder)]
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
        command.append(INTERPRETER)
    child = subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        status = child.wait(limit)
    except BaseException as error:  # also if somebody ends the check: nothing may keep the GPU
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Part(name, error=f"took longer than {limit:.0f} s", seconds=limit)
    path = folder / f"{name}.json"
    if not path.exists():
        return Part(name, error=f"its process ended with status {status} and left no result")
    return msgspec.json.decode(path.read_bytes(), type=Part)


def document(device: str, kind: str, parts: Sequence[Part]) -> GpuReport:
    """As it is written down."""
    command = shlex.join(["benchmarks/gpu_check.sh", *sys.argv[1:]])
    versions = report.versions() | {"triton": report.version_of("triton")}
    return GpuReport(f"gpu-{kind}", command, device, report.machine(), versions, parts)


def lines(part: Part) -> list[str]:
    """A part for the terminal: what failed, every figure."""
    failed = [check for check in part.checks if not check.passed]
    passed = len(part.checks) - len(failed)
    head = f"{part.name}: {'good' if part.good else 'NOT GOOD'}, {part.seconds:.0f} s"
    told = [f"{head}, {passed} of {len(part.checks)} checks passed" if part.checks else head]
    if part.error:
        told.append(f"  {part.error}")
    told += [f"  failed: {check.name}: {check.said}" for check in failed]
    told += [f"  {shown(row)}" for row in part.rows]
    return told + [f"  {note}" for note in part.notes]


def shown(row: Row) -> str:
    """A figure in one line."""
    name = f"{row.name} ({row.variant})" if row.variant else row.name
    beside = f"{row.fraction:6.1%} of {row.limit_name}" if row.fraction else ""
    return f"{name:56} {row.value:14,.2f} {row.unit:8} {beside}".rstrip()
