"""Tensors as the library must have them: it reads by address, and sees neither shapes nor dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.library import TYPES


def check(name: str, x: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None) -> None:
    """ValueError unless `x` has `shape` (None: any length) and `dtype` (None: one that steps have)."""
    if dtype is None:
        check_dtype(name, x)
    elif x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, not {x.dtype}")
    found = x.shape
    if len(found) != len(shape) or any(a != b for a, b in zip(found, shape, strict=True) if b is not None):
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} must be [{wanted}], not {list(found)}")


def check_dtype(name: str, x: Tensor) -> None:
    """ValueError unless steps can be in the dtype of `x`."""
    if x.dtype not in TYPES:
        raise ValueError(f"{name} must be bfloat16 or float32, not {x.dtype}")
