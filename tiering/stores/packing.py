"""Small pages in one run of device memory, so that they cross in one copy."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

WORD = 16  # bytes: pages of a whole number of these are moved as vectors


class Packing(Protocol):
    """Moves whole pages inside the device, on the stream that is current. `pages [count, bytes]` uint8 are
    a pool's, `ids [n]` int64 on its device."""

    def gather(self, pages: Tensor, ids: Tensor, out: Tensor) -> None:
        """`out [n, bytes]`, contiguous, becomes pages `ids`."""
        ...

    def scatter(self, pages: Tensor, ids: Tensor, source: Tensor) -> None:
        """Pages `ids`, which differ, become `source [n, bytes]`, contiguous."""
        ...


class PlainPacking:
    """With torch alone."""

    def gather(self, pages: Tensor, ids: Tensor, out: Tensor) -> None:
        torch.index_select(pages, 0, ids, out=out)

    def scatter(self, pages: Tensor, ids: Tensor, source: Tensor) -> None:
        pages.index_copy_(0, ids, source)


class KernelPacking:
    """With the kernels of `kernels.triton.pages`."""

    def gather(self, pages: Tensor, ids: Tensor, out: Tensor) -> None:
        from kernels.triton.pages import gather_pages

        gather_pages(pages, ids, out)

    def scatter(self, pages: Tensor, ids: Tensor, source: Tensor) -> None:
        from kernels.triton.pages import scatter_pages

        scatter_pages(pages, ids, source)


def packing_for(device: torch.device, page_bytes: tuple[int, ...]) -> Packing:
    """Triton's kernels where they run and pages are whole vectors."""
    if device.type != "cuda" or any(size % WORD for size in page_bytes):
        return PlainPacking()
    from kernels.triton.backend import refusal

    return PlainPacking() if refusal(device) else KernelPacking()
