"""How many KV pages the benchmark takes: enough for its largest case, or for the largest that fits."""

from __future__ import annotations

import torch

from agentserve.bench.kernels.sizes import Sizes
from agentserve.bench.kernels.subject import CPU, Subject
from agentserve.executor.pool import KVPool, kv_groups
from agentserve.machine import available_memory
from agentserve.values import show_size

POOL_SHARE = 0.7  # of what is available
SPARE = 1 << 30  # bytes left for packed weights and activations


def pool_for(sizes: Sizes, subject: Subject, kv_dtype: torch.dtype, page_size: int) -> KVPool:
    """A pool for as many of the cases as memory allows. ValueError if not even one context fits."""
    groups = kv_groups(subject.config, page_size, kv_dtype)
    per_page = sum(group.page_bytes for group in groups)
    available = available_memory()
    wanted = [rows * -(-tokens // page_size) for rows, tokens in cases(sizes, page_size)]
    if available is not None:
        most = int(max(0, available - SPARE) * POOL_SHARE) // per_page
        wanted = [pages for pages in wanted if pages <= most]
    least = -(-sizes.longest // page_size)
    if max(wanted, default=0) < least:
        size = show_size(least * per_page)
        raise ValueError(f"too little memory for the {size} of KV of {sizes.longest} tokens")
    return KVPool(subject.config, (max(wanted),) * len(groups), page_size, kv_dtype, CPU)


def cases(sizes: Sizes, page_size: int) -> list[tuple[int, int]]:
    """(rows, tokens) of all that is measured."""
    found = [
        (rows, context + 1)
        for rows in (*sizes.attended, *sizes.decoded, *sizes.overhead)
        for context in sizes.contexts
    ]
    found += [(1, sizes.longest), (sizes.sampled, page_size + 1)]
    if sizes.sharing:
        found.append((sizes.sharing[0], sum(sizes.sharing[1:]) + 1))
    return found
