"""What KV pages of each dtype keep, in plain torch. Page layout `[..., slots, kv_heads, kv_width]`.

int8 pages hold codes and, behind each token's codes of one head, the four bytes of their scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_CODE = 127


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x [..., dim]` as pages of `dtype` keep it: `[..., kv_width(dim, dtype)]`.

    What `dtype` cannot hold becomes NaN. Pages of x's own dtype keep it as it is, infinities too.
    """
    if dtype == torch.int8:
        codes, scale = quantized(x)
        return torch.cat((codes, scale.view(torch.int8)), dim=-1)
    narrow = x.to(dtype)
    return narrow if dtype == x.dtype else narrow.masked_fill(~narrow.isfinite(), torch.nan)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., dim]` as int8 codes of its shape and float32 scales `[..., 1]`.

    A scale that would be subnormal is 0, and so are its codes. Where not all of x is finite the scale
    is NaN, and with it every score or output that it enters.
    """
    wide = x.to(torch.float32)
    scale = wide.abs().amax(dim=-1, keepdim=True) / LARGEST_CODE
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    scale = torch.where(wide.isfinite().all(dim=-1, keepdim=True), scale, torch.nan)
    codes = torch.where(scale > 0, torch.round(wide / scale), 0.0)
    return codes.to(torch.int8), scale


def scales_of(pages: Tensor, dim: int) -> Tensor | None:
    """Float32 scales of `pages [..., kv_width]`, without their last dimension; None where there are none."""
    if pages.dtype != torch.int8:
        return None
    return pages[..., dim:].contiguous().view(torch.float32).squeeze(-1)
