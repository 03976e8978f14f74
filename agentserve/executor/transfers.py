"""What goes to the device and back in each step: many small tensors, and one copy each way.

On a device every copy waits for the ones before it, and one that brings a result back waits for all the
kernels; on the CPU nothing is copied at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LANE = 2  # int64: kernels want tensors at multiples of 16 bytes


def to_device(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """int64 tensors of the CPU on `device`, in one copy."""
    if device.type == "cpu":
        return list(parts)
    flat, starts = packed(parts, pin=device.type == "cuda")
    return unpacked(flat.to(device, non_blocking=True), parts, starts)


def to_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """int64 and bool tensors of one device on the CPU, in one copy."""
    if not parts or parts[0].device.type == "cpu":
        return list(parts)
    flat = torch.cat([part.flatten().to(torch.int64) for part in parts]).cpu()
    sizes = [part.numel() for part in parts]
    return [
        found.view(part.shape).to(part.dtype)
        for found, part in zip(torch.split(flat, sizes), parts, strict=True)
    ]


def packed(parts: Sequence[Tensor], *, pin: bool = False) -> tuple[Tensor, list[int]]:
    """The parts in one int64 tensor, and where each begins: at multiples of 16 bytes. pin: in memory that
    a GPU reads by itself; torch gives it to nobody else until it has."""
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += -(-part.numel() // _LANE) * _LANE
    flat = torch.empty(end, dtype=torch.int64, pin_memory=pin)
    for part, start in zip(parts, starts, strict=True):
        flat[start : start + part.numel()].copy_(part.flatten())
    return flat, starts


def unpacked(flat: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """`packed` undone, without a copy."""
    return [
        flat[start : start + part.numel()].view(part.shape) for part, start in zip(like, starts, strict=True)
    ]
