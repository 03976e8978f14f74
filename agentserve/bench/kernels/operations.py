"""The small operations, each called alone, beside plain copies of as many bytes as they read and write.

A backend whose whole step is one call has them inside it and does not call these: they are what a step
is composed of elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor

from agentserve.bench.kernels.cases import Case
from agentserve.bench.kernels.costs import Demand
from agentserve.bench.kernels.scene import GREEDY, Scene
from agentserve.bench.kernels.sizes import Sizes
from agentserve.bench.kernels.subject import Variant
from agentserve.bench.kernels.timing import Run, Stopwatch, each
from agentserve.bench.report import Row
from agentserve.core.plan import SampleSpec
from agentserve.executor.batch import Piece, build_batch
from agentserve.executor.sampler import Sampler
from agentserve.types import Sampling, SessionId, TurnId

REPEATS = 16  # calls per run: one alone is too short to time
PAGES = 128  # copied per run

Work = Callable[[], object]


def cases(scene: Scene, variant: Variant, watch: Stopwatch, sizes: Sizes) -> Iterator[Case]:
    """Norm, activation, rotation, KV write at each number of rows; page copies; sampling.

    Their operands are in the caches, as in a step. The limit is a plain copy that reads and writes as
    many bytes, timed in alternation; both include what one call costs.
    """
    for count in sizes.operations:
        for name, (work, moved) in _works(scene, variant, count).items():
            title, pair = f"{name}, {count} rows", ([work] * REPEATS, [_copy(moved)] * REPEATS)
            yield Case("operations", title, partial(_beside_copy, watch, title, *pair))
    title = f"page copy, {scene.pool.storages[0][0].nbytes:,} bytes"
    yield Case("operations", title, partial(_page_copies, scene, variant, watch, title))
    title = f"sampling, {sizes.sampled} rows"
    yield Case("operations", title, partial(_sampling, scene, variant, watch, sizes.sampled))


def _works(scene: Scene, variant: Variant, rows: int) -> dict[str, tuple[Work, int]]:
    """Each operation, and the bytes that it reads and writes."""
    config, ops, dtype = scene.config, variant.decoder.ops, variant.decoder.dtype
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim

    def new(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    x, residual, weight, gate_up = new(rows, hidden), new(rows, hidden), new(hidden), new(rows, 2 * inner)
    q, k, v = new(rows, config.heads + config.kv_heads, dim), *(new(rows, config.kv_heads, dim) for _ in "kv")
    cos, sin = torch.rand(rows, dim // 2), torch.rand(rows, dim // 2)
    slots = torch.arange(rows, dtype=torch.int64) % (scene.pool.pages[0] * scene.pool.page_size)
    kv = scene.pool.storages[0][:, 0]
    written = 2 * rows * config.kv_heads * kv.shape[-1] * kv.itemsize
    return {
        "RMS norm + residual": (lambda: ops.add_rms_norm(x, residual, weight, config.rms_eps), 4 * x.nbytes),
        "silu * up": (lambda: ops.silu_mul(gate_up), gate_up.nbytes * 3 // 2),
        "rotation of Q and K": (lambda: ops.rope(q, cos, sin), 2 * q.nbytes + 2 * cos.nbytes),
        "KV write": (lambda: ops.write_kv(kv, slots, k, v), k.nbytes + v.nbytes + written),
    }


def _page_copies(scene: Scene, variant: Variant, watch: Stopwatch, name: str) -> list[Row]:
    """Whole pages, scattered, more of them than the caches hold. The limit is memcpy."""
    ops, storage, slots = variant.decoder.ops, scene.pool.storages[0], scene.pool.page_size
    count = max(1, min(PAGES, storage.shape[0] // 2))
    pages, nbytes = scene.tables(1, 2 * count * slots)[0], storage[0].nbytes

    def backend(source: int, target: int) -> Work:
        return lambda: ops.copy_page(storage, source, target, slots)

    def plain(source: int, target: int) -> Work:
        return partial(memmove, storage[target].data_ptr(), storage[source].data_ptr(), nbytes)

    pairs = list(zip(pages[:count], pages[count:], strict=True))
    works, copies = [backend(*pair) for pair in pairs], [plain(*pair) for pair in pairs]
    return _beside_copy(watch, name, works, copies)


def _sampling(scene: Scene, variant: Variant, watch: Stopwatch, rows: int) -> list[Row]:
    """Greedy and top-p over the model's own logits. The limit is reading them once."""
    config, decoder = scene.config, variant.decoder
    plan = scene.plan(scene.decode(rows, scene.pool.page_size))
    with torch.inference_mode():
        pieces = [Piece(number, 0, 1) for number in range(rows)]
        batch = build_batch(pieces, plan.chunks, config, scene.pool, decoder.ops)
        logits = decoder.logits(decoder.forward(batch).rows)
    sampler = Sampler(config.vocab_size, [b""] * config.vocab_size, (), drawing=decoder.ops.drawing())

    def run(settings: Sampling) -> Run:
        specs = [
            (SessionId(f"bench-{number}"), TurnId(1), replace(_spec(settings), prompt=1))
            for number in range(rows)
        ]
        return each([lambda: sampler.sample(logits, specs)])

    names = {"greedy": GREEDY, "top-p 0.95": Sampling(temperature=0.8, top_p=0.95)}
    times = watch.alternate({name: run(settings) for name, settings in names.items()})
    demand = Demand(logits.values.nbytes)
    return [
        times[name].row("operations", f"sampling {name}, {rows} rows of {config.vocab_size:,}", demand)
        for name in names
    ]


def _spec(settings: Sampling) -> SampleSpec:
    return SampleSpec(settings, (1,), 1, 1)


def _copy(moved: int) -> Work:
    """A plain copy that reads and writes `moved` bytes together."""
    source = torch.zeros(max(1, moved // 2), dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _beside_copy(watch: Stopwatch, name: str, works: Sequence[Work], copies: Sequence[Work]) -> list[Row]:
    times = watch.alternate({"operation": each(works), "copy": each(copies)})
    return [times["operation"].row_beside("operations", name, times["copy"], "copy")]
