"""The attention kernels of realistic models, to compile ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from kernels.ops import AttentionShape, kv_width
from kernels.triton.attention import _attend, _merge, choice_for
from kernels.triton.attention_plan import _LOG2_E, _MERGE_HEADS
from kernels.triton.launch import TRITON_NAMES, Case, Choice
from kernels.triton.shapes import MODELS, PAGE_SIZES, STEPS, ModelShape


def cases() -> Iterator[Case]:
    """Each model, step dtype and page size, over pages of the step's dtype and of int8."""
    for model in MODELS:
        for dtype in STEPS:
            for slots in PAGE_SIZES:
                for kept in (dtype, torch.int8):
                    yield _attention_case(model, dtype, slots, kept)
            yield _merge_case(model, dtype)


def _attention_case(model: ModelShape, dtype: torch.dtype, slots: int, kept: torch.dtype) -> Case:
    width = kv_width(model.dim, kept)
    shape = AttentionShape(model.heads, model.kv_heads, model.dim, slots)
    element, pages = TRITON_NAMES[dtype], TRITON_NAMES[kept]
    signature = {
        "q": f"*{element}", "kv": f"*{pages}", "plan": "*i32", "out": f"*{element}", "parts": "*fp32",
        "marks": "*fp32",
    }  # fmt: skip
    constants = {
        "SCALE": model.dim**-0.5 * _LOG2_E, "HEADS": model.heads, "KV_HEADS": model.kv_heads,
        "DIM": model.dim, "WIDE": triton.next_power_of_2(model.dim),
        "PAGE": model.layers * 2 * slots * model.kv_heads * width, "SLOTS": slots, "WIDTH": width,
        "WINDOW": 0, "SCALED": kept == torch.int8, "EXACT": False,
    }  # fmt: skip
    name = f"attention-{model.name}-{element}-{pages}-{slots}"
    return Case(name, _attend, signature, constants, choice_for(shape, dtype, kept), decode=True)


def _merge_case(model: ModelShape, dtype: torch.dtype) -> Case:
    element = TRITON_NAMES[dtype]
    signature = {"plan": "*i32", "out": f"*{element}", "parts": "*fp32", "marks": "*fp32"}
    constants = {"HEADS": model.heads, "DIM": model.dim, "WIDE": triton.next_power_of_2(model.dim)}
    choice = Choice({"BLOCK_HEADS": _MERGE_HEADS}, warps=4)
    return Case(f"merge-{model.name}-{element}", _merge, signature, constants, choice, decode=True)
