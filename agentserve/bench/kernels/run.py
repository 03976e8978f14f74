"""The whole benchmark of kernels, in order: machine, products, attention, operations, steps, prefill."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from agentserve.bench.kernels import operations, products
from agentserve.bench.kernels.attention import AttentionAlone
from agentserve.bench.kernels.cases import Findings
from agentserve.bench.kernels.gauge import MachineGauge, machine_rows
from agentserve.bench.kernels.pages import pool_for
from agentserve.bench.kernels.scene import Scene
from agentserve.bench.kernels.sizes import Sizes
from agentserve.bench.kernels.steps import Steps
from agentserve.bench.kernels.subject import ALL, CPU, Choice, Subject, Variant, subjects, variant
from agentserve.bench.kernels.timing import Effort, Stopwatch
from agentserve.executor.pool import KV_DTYPES
from agentserve.models.load import DTYPES
from agentserve.models.source import resolve
from kernels import ops_for
from kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. `kv_dtype` "auto": the model's dtype. `page_size` in tokens."""

    model: str = "smollm2-135m"
    dtype: str = "bf16"
    choices: tuple[Choice, ...] = ALL
    kv_dtype: str = "auto"
    threads: int = 1
    page_size: int = 16
    sizes: Sizes = field(default_factory=Sizes)
    effort: Effort = field(default_factory=Effort)


def measure(settings: Settings, progress: Callable[[str], None] = lambda _: None) -> Findings:
    """Measure everything. ValueError (ModelError) or OSError, one line, if the model cannot be run.

    `progress` hears what comes next.
    """
    torch.set_num_threads(settings.threads)
    dtype = DTYPES[settings.dtype]
    ops, found = ops_for(CPU), Findings()
    _kv_dtype(settings, ops)  # before anything takes time
    progress("loading")
    source = resolve(settings.model)
    models, found.skipped = subjects(source, dtype, settings.choices, ops)
    if not models:
        raise ValueError("; ".join(f"{name}: {reason}" for name, reason in found.skipped.items()))
    positions = models[0].config.max_position
    sizes = settings.sizes.within(positions)
    if sizes != settings.sizes:
        found.skipped["longer contexts"] = f"the model was made for {positions} positions"
    settings = replace(settings, sizes=sizes)
    gauge = MachineGauge(ops, dtype, sizes.read)
    watch = Stopwatch(gauge, settings.effort)
    found.notes.append(f"backend {ops.name}, {settings.threads} threads")
    kv = settings.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    found.notes.append(f"{source.name} in {settings.dtype}, KV in {kv}, pages of {settings.page_size} tokens")
    found.notes += [
        f"{model.name}: weights {'/'.join(model.weights.formats)} as stored; the head's operands are floats"
        for model in models
        if model.weights.layers_in_blocks
    ]
    with torch.inference_mode():
        progress("products")
        for name in models[0].matrices():
            found.add(products.cases(name, models, watch, sizes.products, sizes.stream), watch)
        _with_pool(settings, models, watch, found, progress)
        found.rows[:0] = machine_rows(ops, dtype, watch.seen or [gauge.rates()])
    found.notes.append(f"took {watch.elapsed:.0f} s after loading")
    if watch.hurried:
        found.notes.append(f"{watch.hurried} figures are of fewer runs than wanted: the time was up")
    return found


def _with_pool(
    settings: Settings,
    models: Sequence[Subject],
    watch: Stopwatch,
    found: Findings,
    progress: Callable[[str], None],
) -> None:
    """All that needs KV."""
    sizes, ops = settings.sizes, models[0].ops
    pool = pool_for(settings.sizes, models[0], _kv_dtype(settings, ops), settings.page_size)
    scene = Scene(models[0].config, pool)
    variants = [variant(model, pool, sizes.longest) for model in models]
    progress("filling KV")
    fill(scene, variants[0], sizes)
    gc.collect()  # so that none of it happens in the middle of a step
    steps = Steps(scene, variants, watch)
    progress("attention")
    found.add(AttentionAlone(scene, variants[0], watch).cases(sizes), watch)
    progress("small operations")
    found.add(operations.cases(scene, variants[0], watch, sizes), watch)
    progress("decode and prefill")
    if not variants[0].clock.seconds:
        found.skipped["outside kernels"] = "this backend has no whole step as one call"
    found.add(steps.cases(sizes), watch)


def fill(scene: Scene, first: Variant, sizes: Sizes) -> None:
    """Real KV into every page: one context is computed, and its pages copied to all others."""
    tokens = min(sizes.longest, min(scene.pool.pages) * scene.pool.page_size)
    for plan in scene.fill_plans(tokens):
        for chunk in first.executor.run(plan).chunks:
            if chunk.error:
                raise ValueError(f"{first.name}: {chunk.error}")
    for source, target in scene.spread(tokens):
        for storage in scene.pool.storages:
            first.decoder.ops.copy_page(storage, source, target, scene.pool.page_size)


def _kv_dtype(settings: Settings, ops: Ops) -> torch.dtype:
    dtype = DTYPES[settings.dtype]
    found = dtype if settings.kv_dtype == "auto" else KV_DTYPES[settings.kv_dtype]
    if found not in ops.kv_dtypes(dtype):
        raise ValueError(
            f"--kv-dtype {settings.kv_dtype}: {ops.name} kernels cannot keep it for {settings.dtype} models"
        )
    return found
