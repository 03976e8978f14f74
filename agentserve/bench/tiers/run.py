"""All parts of the benchmark after each other, in a folder of their own that is removed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentserve.bench.tiers import moves, resume, steps
from agentserve.bench.tiers.findings import Findings
from agentserve.config import load
from agentserve.machine import usable_cores
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.spec import WorkerSpec, worker_spec
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.values import show_size

BLOCK_BYTES = 368_640  # of SmolLM2-135M in bf16: enough to begin with, where the model is another
STEPS_AHEAD = 600  # tokens that a session may grow by while its steps are measured


@dataclass(frozen=True)
class EngineSettings:
    """Which engine, as for `agentserve serve`; and what is done with it."""

    flags: dict[str, str]
    resumes: resume.Plan | None
    steps: steps.Plans | None


def measure(
    folder: Path, sizes: moves.Sizes | None, engine: EngineSettings | None, progress: Callable[[str], None]
) -> Findings:
    """sizes: of the moves; None: none are measured. Raises OSError, ValueError or RuntimeError, one line,
    if the folder or the engine cannot be used. Nothing is left in `folder`."""
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}")
    found = Findings()
    mine = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=folder))
    try:
        if sizes is not None:
            _add(found, moves.measure(sizes, mine, progress))
        if engine is not None:
            _engine(found, engine, mine, progress)
    finally:
        shutil.rmtree(mine, ignore_errors=True)
    return found


def _add(found: Findings, more: Findings) -> None:
    found.rows += more.rows
    found.notes += more.notes
    found.skipped |= more.skipped


def _engine(found: Findings, settings: EngineSettings, folder: Path, progress: Callable[[str], None]) -> None:
    progress("the model is loaded")
    spec, built = build(settings)
    hello = built.hello
    found.notes.append(
        f"engine: {hello.parameters:,} parameters, {hello.dtype}, weights {hello.weights}, "
        f"KV {hello.kv_dtype}, {hello.backend} kernels, a pool of {show_size(hello.kv_bytes)}"
    )
    if settings.resumes is not None:
        _add(found, resume.measure(built, spec, folder / "resumes", settings.resumes, progress))
    if settings.steps is not None:
        _add(found, steps.measure(built, spec, folder / "steps", settings.steps, progress))


def build(settings: EngineSettings) -> tuple[WorkerSpec, BuiltEngine]:
    """The engine, without tiers, over a pool in which everything has room."""
    spec = worker_spec(load(dict(settings.flags), None), 0, "", os.getpid(), usable_cores())
    needed = [4]
    if settings.resumes is not None:
        needed.append(resume.pool_blocks(settings.resumes, spec.page_size))
    if settings.steps is not None:
        needed += [each.blocks(spec.page_size, STEPS_AHEAD) for each in settings.steps.loads]
    if spec.device_kv is None:
        spec = msgspec.structs.replace(spec, device_kv=max(needed) * BLOCK_BYTES)
    return spec, build_engine(spec)
