"""Steps on a GPU that is not there: kernels go through Triton's own handling of arguments, and are compiled
instead of launched. `python -m tests.triton.served_step CAPABILITY` tells, as JSON, what was compiled while a
decoder was prepared and what while it then served, each as (kernel, pointers not known to be aligned, numbers
that were specialised)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.ops import Attention, AttentionShape, DecoderParts, Draw, GroupPages, LayerParts, Span
from kernels.triton import attention_plan, embedding, heads, norms, pages, part_sums, plain_products, sampling
from kernels.triton.launch import FP_FUSION, Choice, Kernel
from kernels.triton.ops import TritonOps
from kernels.triton.recorder import EagerRecorder

LAUNCHING = (attention_plan, embedding, heads, norms, pages, part_sums, plain_products, sampling)
CPU, BF16 = torch.device("cpu"), torch.bfloat16
HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB, SLOTS = 4, 2, 64, 256, 512, 1000, 16


class Nowhere:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiling:
    """In the place of `launch`."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, list[str], list[str]]] = {}

    def __call__(
        self, what: Kernel, grid: Sequence[int], *args: Any, choice: Choice, **constants: Any
    ) -> None:
        if 0 in grid:
            return
        built = what.warmup(
            *args, grid=tuple(grid), **choice.tiles, **constants, num_warps=choice.warps,
            num_stages=choice.stages, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
        special = {what.arg_names[place[0]] for place, attributes in built.src.attrs.items() if attributes}
        kinds = {name: str(kind) for name, kind in built.src.signature.items() if kind != "constexpr"}
        unknown = [name for name, kind in kinds.items() if kind.startswith("*") and name not in special]
        fixed = [name for name, kind in kinds.items() if not kind.startswith("*") and name in special]
        self.found.setdefault(built.hash, (what.fn.__name__, unknown, fixed))


@dataclass(frozen=True)
class Group:
    storage: Tensor
    slots: Tensor
    attention: Attention


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=BF16)


def parts() -> DecoderParts:
    rows = (HEADS + 2 * KV_HEADS) * DIM
    layer = LayerParts(
        random(HIDDEN), random(rows, HIDDEN), random(rows), random(DIM), random(DIM),
        random(HIDDEN, HEADS * DIM), None, random(HIDDEN), random(2 * INNER, HIDDEN), None,
        random(HIDDEN, INNER), None, 0, 0, True,
    )  # fmt: skip
    turns = torch.rand(4096, DIM // 2), torch.rand(4096, DIM // 2)
    return DecoderParts(
        BF16, "float", HEADS, KV_HEADS, DIM, 1e-5, random(VOCAB, HIDDEN), [layer], random(HIDDEN),
        random(VOCAB, HIDDEN), *turns,
    )  # fmt: skip


def main() -> None:
    driver.set_active(Nowhere(int(sys.argv[1])))
    compiling = Compiling()
    for module in LAUNCHING:
        module.launch = compiling  # type: ignore[attr-defined]
    ops = TritonOps(CPU, EagerRecorder)
    decoder = ops.decoder(parts())
    assert decoder is not None
    storage = torch.zeros(300, 1, 2, SLOTS, KV_HEADS, DIM, dtype=BF16)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, SLOTS)
    with torch.inference_mode():
        decoder.prepare([GroupPages(storage, shape)], 4)
        prepared = len(compiling.found)
        for rows in (1, 16, 70):
            attention = ops.attention(shape, [Span(0, rows, 5)], torch.arange(10)[None])
            at = torch.arange(rows)
            hidden = decoder.forward(at, at, [Group(storage, at, attention)])
            logits = decoder.logits(hidden.rows[: min(rows, 4)])
            draws = [Draw(0.7, 5 * row, 0.9, 0.1, row, row) for row in range(len(logits.values))]
            drawing = ops.drawing()
            assert drawing is not None
            drawing(logits.values, draws)
        for source, target, slots in ((1, 2, 16), (16, 1, 1)):
            ops.copy_page(storage, source, target, slots)
    found = list(compiling.found.values())
    print(json.dumps({"prepared": found[:prepared], "served": found[prepared:]}))


if __name__ == "__main__":
    main()
