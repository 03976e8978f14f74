"""The KV memory: one page-first tensor per KV group, and who lies where in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentserve.models.config import DecoderConfig
from agentserve.types import KVGroup
from kernels.memory import empty_pages
from kernels.ops import kv_width

KV_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8}
"""In which numbers KV can be kept. Which of them go with a model's dtype: `Ops.kv_dtypes`."""

PAGE_LAYOUT = "page-first-1"
"""Names the outer layout of a page's bytes: `[layers of the group, 2, slots, kv_heads, width]`.
`width` is `kernels.ops.kv_width`: the head dimension, and what the KV dtype keeps beside it.
How K and V lie inside a layer's part is the kernels' own business, named by `Ops.numerics`."""


def kv_groups(config: DecoderConfig, page_size: int, dtype: torch.dtype) -> tuple[KVGroup, ...]:
    """The KV groups of a model with KV in `dtype`, in `DecoderConfig.layer_groups()` order."""
    width = kv_width(config.head_dim, dtype)
    per_layer = 2 * page_size * config.kv_heads * width * dtype.itemsize
    return tuple(
        KVGroup(
            name=group.name,
            layers=group.layers,
            page_bytes=per_layer * len(group.layers),
            window=group.window,
        )
        for group in config.layer_groups()
    )


class KVPool:
    """Pages of every KV group, in the KV's `dtype`. Holds bytes only: which page is whose is the KV
    manager's business.

    Memory is not cleared: a page's slots hold anything until they are written.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.groups = kv_groups(config, page_size, dtype)
        self.page_size = page_size
        self.dtype = dtype
        if len(pages) != len(self.groups) or min(pages) < 1:
            raise ValueError(f"need a page count of at least 1 for each of {len(self.groups)} KV groups")
        self.storages = tuple(
            empty_pages(
                (count, len(group.layers), 2, page_size, config.kv_heads, kv_width(config.head_dim, dtype)),
                dtype,
                device or torch.device("cpu"),
            )
            for group, count in zip(self.groups, pages, strict=True)
        )

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages per group."""
        return tuple(storage.shape[0] for storage in self.storages)

    @property
    def nbytes(self) -> int:
        return sum(storage.numel() * storage.element_size() for storage in self.storages)
