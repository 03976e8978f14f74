"""What the check runs: a layer of an 8B model on a GPU, a tiny one in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentserve.bench.gpu.device import Device


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a layer, and how much of everything. `contexts`: tokens of the sequences that are attended to."""

    dtypes: tuple[torch.dtype, ...]
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    slots: int
    rows: int  # of what is compared
    contexts: tuple[int, ...]
    chunk: int  # tokens of a prefill among decoding rows
    product_rows: tuple[int, ...]  # of what is timed
    decode: tuple[tuple[int, int], ...]  # (rows, context) of attention that is timed
    prefill: tuple[int, ...]
    pages: int  # that are moved
    copied: int  # bytes
    squares: int  # of a matrix product that measures the device
    whole: tuple[tuple[int, int], ...]  # (sessions, context) of decode steps of the model
    prompts: tuple[int, ...]
    steps: int


FULL = Sizes(
    dtypes=(torch.bfloat16, torch.float16),
    hidden=4096, heads=32, kv_heads=8, dim=128, inner=14336, vocab=128256, slots=16, rows=70,
    contexts=(1, 100, 777, 2500), chunk=150, product_rows=(1, 16, 256, 2048),
    decode=((1, 2048), (32, 2048), (8, 16384)), prefill=(512, 4096), pages=512, copied=1 << 30,
    squares=8192, whole=((1, 64), (8, 2000), (64, 500)), prompts=(400, 3500), steps=20,
)  # fmt: skip

REDUCED = Sizes(
    dtypes=(torch.float16,),  # the interpreter has no products in bfloat16
    hidden=64, heads=4, kv_heads=2, dim=16, inner=96, vocab=200, slots=16, rows=5,
    contexts=(1, 21), chunk=3, product_rows=(1, 3), decode=((2, 20),), prefill=(20,), pages=3,
    copied=1 << 16, squares=64, whole=((1, 9), (2, 5)), prompts=(9,), steps=2,
)  # fmt: skip


def sizes_for(on: Device) -> Sizes:
    return REDUCED if on.reduced else FULL
