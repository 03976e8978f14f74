"""Sizes of models whose kernels are compiled ahead of time, to see that they fit and spill nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What kernels depend on. `inner` and `vocab` are widths of products, the others are `kernels.ops`'s."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    layers: int


MODELS = (
    ModelShape("llama-3-8b", 4096, 32, 8, 128, 14336, 128256, 32),
    ModelShape("qwen2.5-7b", 3584, 28, 4, 128, 18944, 152064, 28),
    ModelShape("smollm2-135m", 576, 9, 3, 64, 1536, 49152, 30),
)
STEPS = (torch.bfloat16, torch.float16)  # dtypes of steps
PAGE_SIZES = (16, 128)  # slots
