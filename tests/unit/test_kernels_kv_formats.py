"""What the reference keeps in KV pages, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.kv_formats import kept, quantized, scales_of
from kernels.ops import head_dim, kv_width
from tests.kv_pages import KV_DTYPES, normal
from tests.kv_pages import kept as expected

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_widths(dtype: torch.dtype) -> None:
    assert kv_width(64, dtype) == (68 if dtype == torch.int8 else 64)
    assert head_dim(kv_width(64, dtype), dtype) == 64
    assert kept(normal(3, 64), dtype).shape == (3, kv_width(64, dtype))


def test_codes_times_scale_are_the_values() -> None:
    x = normal(5, 3, 32) * torch.tensor([1e-3, 1.0, 1e4]).view(3, 1)
    codes, scale = quantized(x)
    assert codes.abs().amax(dim=-1).eq(127).all()
    assert torch.equal(codes.double() * scale.double(), expected(x, torch.int8))
    assert bool(((codes * scale - x).abs() <= scale * 0.5001).all())


def test_a_page_row_is_codes_and_then_the_bytes_of_their_scale() -> None:
    x = normal(2, 4, 16)
    row = kept(x, torch.int8)
    codes, scale = quantized(x)
    assert torch.equal(row[..., :16], codes)
    found = scales_of(row, 16)
    assert found is not None
    assert torch.equal(found, scale.squeeze(-1))
    assert row[0, 0, 16:].numpy().tobytes() == np.float32(scale[0, 0]).tobytes()
    assert scales_of(x, 16) is None


@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_what_cannot_be_kept_is_nan(dtype: torch.dtype, number: float) -> None:
    x = normal(2, 16)
    x[1, 5] = number
    row = kept(x, dtype)
    if dtype == torch.int8:
        scales = scales_of(row, 16)
        assert scales is not None
        assert scales.isnan().tolist() == [False, True]
        assert not row[1, :16].any()
    else:
        assert row.isnan().nonzero().tolist() == [[1, 5]]


def test_pages_of_the_steps_own_dtype_keep_all() -> None:
    x = torch.tensor([[INF, -INF, 3e38, 1.0]])
    assert torch.equal(kept(x, torch.float32), x)
    assert kept(x, torch.float16).isnan().tolist() == [[True, True, True, False]]
