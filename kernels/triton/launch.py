"""How kernels are declared, launched and listed for compiling ahead of time.

Bits must not depend on the step (`kernels.ops`: batch invariance), and Triton compiles a kernel anew for
what it finds special in its arguments: an integer that is 1 or a multiple of 16, a pointer that is aligned.
Another compilation may lay registers out otherwise and add up in another order. So:

- sizes that a model fixes are `tl.constexpr`;
- numbers that change from step to step are named in `kernel(...)`, and never specialised;
- pointers are aligned, always: `launch` refuses others;
- a `Choice` (tile sizes, warps, stages) hangs on the model and the GPU, never on the number of rows, unless
  its kernel's docstring says why bits cannot depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

ALIGNMENT = 16  # bytes: what Triton takes as aligned
FP_FUSION = True  # a * b + c in one rounding, said aloud: what is the default changes with Triton's versions

Kernel = Any
"""A `triton.jit` function: the library has no types to name."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What tuning may choose for a kernel: tile sizes by the name of their `tl.constexpr`, warps, stages."""

    tiles: Mapping[str, int] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One specialisation of a kernel, to compile without a GPU.

    `signature` names the type of each argument that is no constant: "*bf16", "*fp32", "i32", "i64", "fp32";
    pointers are taken to be aligned, as `launch` demands. `decode`: part of a captured decode step, which
    must not spill registers.
    """

    name: str  # unique: "rms_norm-bf16-4096"
    kernel: Kernel
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    choice: Choice
    decode: bool


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a kernel; `varying` names its integer arguments that change from step to step."""

    def declare(function: Callable[..., Any]) -> Kernel:
        return triton.jit(function, do_not_specialize=list(varying))

    return declare


def launch(what: Kernel, grid: Sequence[int], *args: Any, choice: Choice, **constants: Any) -> None:
    """Run a kernel over `grid` on the current stream. Empty grids are nothing to do.

    Raises ValueError for a tensor that does not start at a multiple of `ALIGNMENT` bytes.
    """
    if 0 in grid:
        return
    for arg in args:
        if isinstance(arg, Tensor) and arg.data_ptr() % ALIGNMENT:
            raise ValueError(f"a tensor at {arg.data_ptr():#x} is not aligned to {ALIGNMENT} bytes")
    what[tuple(grid)](
        *args,
        **choice.tiles,
        **constants,
        num_warps=choice.warps,
        num_stages=choice.stages,
        enable_fp_fusion=FP_FUSION,
    )


TRITON_NAMES: Mapping[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""How signatures of a `Case` call torch's dtypes; a pointer to one is `"*" + name`."""
