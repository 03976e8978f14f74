"""The cost model that a worker begins with: from a file, or measured at the start, or none."""

from __future__ import annotations

import logging
from pathlib import Path

from agentserve.core.cost import StepCost
from agentserve.core.ports import Executor
from agentserve.core.timing.fingerprint import Fingerprint
from agentserve.core.timing.saved import CostFileError, checked, decode_saved
from agentserve.executor.calibrate import Bounds, measure_cost
from agentserve.machine import processor
from agentserve.messages import Hello
from agentserve.server.workers.spec import WorkerSpec

log = logging.getLogger(__name__)


def fingerprint(spec: WorkerSpec, hello: Hello, accelerator: str = "") -> Fingerprint:
    """Whose steps this worker's are. accelerator: what the device is, where it is no processor."""
    return Fingerprint(
        model=hello.weights_digest,
        dtype=hello.dtype,
        weights=hello.weights,
        activations=hello.activations,
        kv_dtype=hello.kv_dtype,
        page_size=hello.page_size,
        kernels=hello.backend,
        device=spec.device if spec.tensor_parallel == 1 else f"{spec.device} x {spec.tensor_parallel}",
        threads=spec.threads,
        machine=f"{processor()}, {accelerator}" if accelerator else processor(),
    )


def step_cost(spec: WorkerSpec, here: Fingerprint, executor: Executor, bounds: Bounds) -> StepCost:
    """The model of the file, if one is named and it is of here; else measured now, if steps are to be
    limited by time, promises depend on it, or a file was meant to say it; else one that knows nothing.
    ValueError if there is no such file, or if the limit is shorter than the shortest step."""
    cost = _from_file(spec, here) if spec.step_model is not None else None
    needed = spec.max_step_seconds is not None or spec.step_model is not None or spec.predicts
    if cost is None and not needed:
        return StepCost()
    if cost is None:
        cost = measure_cost(executor, bounds)
        log.info(
            "measured at the start: a decode step takes %.2f ms, a step of %d tokens %.1f ms",
            cost.step([(min(64, bounds.positions - 1), 1)]) * 1e3,
            bounds.largest, cost.step([(0, bounds.largest)]) * 1e3,
        )  # fmt: skip
    _check_limit(spec.max_step_seconds, cost, bounds)
    return cost


def _from_file(spec: WorkerSpec, here: Fingerprint) -> StepCost | None:
    """None: it cannot be used here, which was told. The file stays as it is."""
    assert spec.step_model is not None
    path = Path(spec.step_model)
    try:
        saved = decode_saved(path.read_bytes())
        cost = checked(saved, here)
    except CostFileError as error:
        log.warning("%s: %s; steps are measured now instead", path, error)
        return None
    except OSError as error:
        if not spec.replaces:
            raise ValueError(f"--step-model {path}: {error.strerror or error}") from None
        log.warning("%s: %s; steps are measured now instead", path, error.strerror or error)
        return None
    held_out = saved.held_out
    log.info(
        "step times as fitted to %d steps: off by %.1f %% on average, %.1f %% beyond the bound",
        saved.steps, held_out.mape * 100, held_out.exceeded * 100,
    )  # fmt: skip
    return cost


def _check_limit(limit: float | None, cost: StepCost, bounds: Bounds) -> None:
    if limit is None:
        return
    shortest = cost.step([(0, 1)])
    if shortest > limit:
        raise ValueError(f"--max-step-ms {limit * 1e3:g}: one token alone takes {shortest * 1e3:.3g} ms here")
    # The least that a step may hold is the rest of a page.
    page = min(bounds.page_size, bounds.positions)
    longest = cost.step([(bounds.positions - page, page)])
    if longest > limit:
        log.warning(
            "a page at the end of the context takes %.0f ms: longer than --max-step-ms", longest * 1e3
        )
