"""Whole pages as bytes: copied inside a pool, gathered into one run of staging memory, scattered from it.

A page is one contiguous run of bytes, whatever it holds. Bytes are moved as vectors of up to 16; many small
pages go in one launch. Nothing is computed: no bits depend on how the work is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import kv_width
from kernels.triton.launch import Case, Choice, kernel, launch
from kernels.triton.shapes import MODELS, PAGE_SIZES, STEPS, ModelShape

VECTOR = 16  # bytes that one thread moves at once, at best
CHOICE = Choice({"BLOCK": 1024}, warps=4, stages=1)  # vectors a program: eight for each thread
_WORD = 4


@triton.jit
def _words(groups, LANES: tl.constexpr):
    """Offsets `[groups, LANES]` of the words of vectors: together, so that they are moved at once."""
    return groups.to(tl.int64)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@kernel("source", "target", "vectors")
def copy_page_kernel(
    pool,
    source,
    target,
    vectors,
    PAGE: tl.constexpr,
    PART: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid `(K and V of every layer, blocks)`: the first `vectors` of each part. Sizes in words."""
    part = tl.program_id(0).to(tl.int64) * PART
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = _words(groups, LANES)
    mask = (groups < vectors)[:, None]
    words = tl.load(pool + (source.to(tl.int64) * PAGE + part + at), mask=mask)
    tl.store(pool + (target.to(tl.int64) * PAGE + part + at), words, mask=mask)


@kernel()
def move_pages_kernel(
    pool, ids, run, INTO_POOL: tl.constexpr, VECTORS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid `(pages, blocks of a page)`: page `ids[i]` of the pool to place i of the run, or back."""
    number = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (groups < VECTORS)[:, None]
    at = _words(groups, LANES)
    outside = run + (number * (VECTORS * LANES) + at)
    inside = pool + (tl.load(ids + number) * (VECTORS * LANES) + at)
    if INTO_POOL:
        tl.store(inside, tl.load(outside, mask=mask), mask=mask)
    else:
        tl.store(outside, tl.load(inside, mask=mask), mask=mask)


def copy_page(storage: Tensor, source: int, target: int, slots: int) -> None:
    """`Ops.copy_page`: the first `slots` token slots of K and V of every layer of one page, to another.

    `storage [pages, layers, 2, slots, kv_heads, width]`, contiguous.
    """
    _, layers, parts, per_page, heads, width = storage.shape
    token = heads * width * storage.element_size()
    vector = math.gcd(token, VECTOR)
    word = min(vector, _WORD)
    vectors = slots * token // vector
    launch(
        copy_page_kernel,
        (layers * parts, triton.cdiv(vectors, CHOICE.tiles["BLOCK"])),
        _as_words(storage, word),
        source,
        target,
        vectors,
        choice=CHOICE,
        PAGE=layers * parts * per_page * token // word,
        PART=per_page * token // word,
        LANES=vector // word,
    )


def gather_pages(storage: Tensor, ids: Tensor, out: Tensor) -> None:
    """Pages `ids [n]` int64 of `storage [pages, ...]` into `out [n, bytes of a page]` uint8, in their order.

    Raises ValueError for pages that are no whole number of vectors of `VECTOR` bytes.
    """
    _move(storage, ids, out, into_pool=False)


def scatter_pages(storage: Tensor, ids: Tensor, source: Tensor) -> None:
    """`source [n, bytes of a page]` uint8 into pages `ids [n]` int64 of `storage`; ids must differ.

    Raises ValueError for pages that are no whole number of vectors of `VECTOR` bytes.
    """
    _move(storage, ids, source, into_pool=True)


def _move(storage: Tensor, ids: Tensor, run: Tensor, *, into_pool: bool) -> None:
    size = math.prod(storage.shape[1:]) * storage.element_size()
    if size % VECTOR:
        raise ValueError(f"pages of {size} bytes are no whole number of vectors of {VECTOR} bytes")
    if run.dtype != torch.uint8 or run.shape != (ids.shape[0], size) or not run.is_contiguous():
        raise ValueError(f"{ids.shape[0]} pages of {size} bytes need as many contiguous uint8")
    launch(
        move_pages_kernel,
        (ids.shape[0], triton.cdiv(size // VECTOR, CHOICE.tiles["BLOCK"])),
        _as_words(storage, _WORD),
        ids.contiguous(),
        _as_words(run, _WORD),
        choice=CHOICE,
        INTO_POOL=into_pool,
        VECTORS=size // VECTOR,
        LANES=VECTOR // _WORD,
    )


def _as_words(memory: Tensor, word: int) -> Tensor:
    """Contiguous memory as one line of words of `word` bytes. Raises ValueError where it has gaps."""
    if not memory.is_contiguous():
        raise ValueError("pages are moved in contiguous memory only")
    return memory.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[word])


def cases(models: Sequence[ModelShape] = MODELS) -> Iterator[Case]:
    """Both kernels for each model's pages in the step's dtype and in int8, of both sizes."""
    for model in models:
        for kept in (STEPS[0], torch.int8):
            for slots in PAGE_SIZES:
                yield from _page_cases(model, slots, kept)


def _page_cases(model: ModelShape, slots: int, kept: torch.dtype) -> Iterator[Case]:
    token = model.kv_heads * kv_width(model.dim, kept) * kept.itemsize
    page = model.layers * 2 * slots * token
    vector = math.gcd(token, VECTOR)
    name = f"{model.name}-{kept.itemsize}-{slots}"
    constants = {"PAGE": page // _WORD, "PART": slots * token // _WORD, "LANES": vector // _WORD}
    signature = {"pool": "*i32", "source": "i32", "target": "i32", "vectors": "i32"}
    yield Case(f"copy_page-{name}", copy_page_kernel, signature, constants, CHOICE, decode=False)
    signature = {"pool": "*i32", "ids": "*i64", "run": "*i32"}
    for into_pool, verb in ((False, "gather"), (True, "scatter")):
        constants = {"INTO_POOL": into_pool, "VECTORS": page // VECTOR, "LANES": VECTOR // _WORD}
        yield Case(f"{verb}_pages-{name}", move_pages_kernel, signature, constants, CHOICE, decode=False)
