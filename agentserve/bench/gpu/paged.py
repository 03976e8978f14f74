"""Operations over KV pages: beside the reference, and whatever stands in pages that nobody may see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentserve.bench.gpu.device import Device
from agentserve.bench.gpu.result import Check
from agentserve.bench.gpu.rowwise import close
from agentserve.bench.gpu.sizes import Sizes
from agentserve.bench.limits import DTYPE_NAMES
from kernels.ops import AttentionShape, Ops, Span, kv_width
from kernels.reference import ReferenceOps
from kernels.triton import pages as page_kernels
from kernels.triton.attention_plan import DecodeLayout
from kernels.triton.recorder import EagerRecorder, GraphRecorder

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Attended:
    """One sequence: K and V of its `tokens`, queries of its last `asked`."""

    tokens: int
    asked: int
    q: Tensor  # [asked, heads, dim]
    k: Tensor  # [tokens, kv_heads, dim]
    v: Tensor


def checks(on: Device, sizes: Sizes, ops: Ops) -> Iterator[Check]:
    """Attention over KV of each dtype, and moves of pages."""
    for dtype in sizes.dtypes:
        for kept in (dtype, torch.int8):
            name = f"attention {DTYPE_NAMES[dtype]}, KV {DTYPE_NAMES[kept]}"
            try:
                yield from _attention(name, on, sizes, ops, dtype=dtype, kept=kept)
            except Exception as error:  # one kernel that fails must not hide the others
                yield Check(name, False, f"{type(error).__name__}: {error}"[:300])
    yield from _moves(on, sizes, ops)


def sequences(sizes: Sizes, dtype: torch.dtype) -> list[Attended]:
    """One decoding row for each context, and a chunk of a prefill behind each but the shortest."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    found = []
    for context in sizes.contexts:
        for asked in (1, min(sizes.chunk, context)):
            keys = (context, sizes.kv_heads, sizes.dim)
            found.append(
                Attended(context, asked, random(asked, sizes.heads, sizes.dim), random(*keys), random(*keys))
            )
    return found


class Pool:
    """Pages for some sequences, in a random order; the memory between is NaN before anything is written."""

    def __init__(
        self, among: Sequence[Attended], sizes: Sizes, kept: torch.dtype, on: torch.device, seed: int
    ):
        self._sizes, self._on = sizes, on
        self._among = among
        widths = [-(-one.tokens // sizes.slots) for one in among]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(sum(widths) + 3, generator=generator).tolist()
        shape = (len(order), 2, 2, sizes.slots, sizes.kv_heads, kv_width(sizes.dim, kept))
        fill = 127 if kept == torch.int8 else torch.nan
        self.storage = torch.full(shape, fill, dtype=kept, device=on)
        self.kv = self.storage[:, 1]  # of the second of two layers
        self.tables = torch.full((len(among), max(widths)), order[-1], dtype=torch.int64)
        for row, width in enumerate(widths):
            begin = sum(widths[:row])
            self.tables[row, :width] = torch.tensor(order[begin : begin + width])

    def write(self, ops: Ops, dtype: torch.dtype) -> None:
        """All K and V."""
        slots = self._sizes.slots
        for row, one in enumerate(self._among):
            at = torch.arange(one.tokens)
            places = self.tables[row][at // slots] * slots + at % slots
            k, v = one.k.to(self._on, dtype), one.v.to(self._on, dtype)
            ops.write_kv(self.kv, places.to(self._on), k, v)

    def attend(self, ops: Ops, dtype: torch.dtype) -> Tensor:
        """All rows in one step."""
        sizes = self._sizes
        spans, row = [], 0
        for one in self._among:
            spans.append(Span(row, one.asked, one.tokens - one.asked))
            row += one.asked
        shape = AttentionShape(sizes.heads, sizes.kv_heads, sizes.dim, sizes.slots)
        q = torch.cat([one.q for one in self._among]).to(self._on, dtype)
        return ops.attention(shape, spans, self.tables)(q, self.kv)


def run(
    among: Sequence[Attended],
    sizes: Sizes,
    ops: Ops,
    *,
    on: torch.device,
    kept: torch.dtype,
    dtype: torch.dtype,
    seed: int = 1,
) -> Tensor:
    """Attention of `among` over pages of their own."""
    pool = Pool(among, sizes, kept, on, seed)
    pool.write(ops, dtype)
    return pool.attend(ops, dtype)


def _attention(
    name: str, on: Device, sizes: Sizes, ops: Ops, *, dtype: torch.dtype, kept: torch.dtype
) -> Iterator[Check]:
    among = sequences(sizes, dtype)
    found = run(among, sizes, ops, on=on.device, kept=kept, dtype=dtype)
    wide = torch.float32 if kept == dtype else kept
    expected = run(among, sizes, ReferenceOps(CPU), on=CPU, kept=wide, dtype=torch.float32)
    yield close(name, found, expected, dtype)
    elsewhere = run(among, sizes, ops, on=on.device, kept=kept, dtype=dtype, seed=2)
    yield _same(f"{name}: the same bits on other pages", elsewhere, found)
    row, wrong = 0, 0
    for one in among:
        alone = run([one], sizes, ops, on=on.device, kept=kept, dtype=dtype, seed=3)
        wrong += int(not torch.equal(alone, found[row : row + one.asked]))
        row += one.asked
    said = f"{wrong} of {len(among)} sequences differ" if wrong else ""
    yield Check(f"{name}: the same bits alone", not wrong, said)
    last = among[-1]
    token = Attended(last.tokens, 1, last.q[-1:], last.k, last.v)
    decoded = run([token], sizes, ops, on=on.device, kept=kept, dtype=dtype)
    yield _same(f"{name}: the same bits in a chunk and alone", decoded, found[-1:])
    yield _recorded(name, [one for one in among if one.asked == 1], on, sizes, ops, dtype=dtype, kept=kept)


def _recorded(
    name: str, among: Sequence[Attended], on: Device, sizes: Sizes, ops: Ops, *, dtype: torch.dtype,
    kept: torch.dtype,
) -> Check:  # fmt: skip
    """Decoding rows out of one recording (a CUDA graph), in two orders, with padding behind them."""
    pool = Pool(among, sizes, kept, on.device, 4)
    pool.write(ops, dtype)
    expected = pool.attend(ops, dtype)
    rows, shape = len(among), AttentionShape(sizes.heads, sizes.kv_heads, sizes.dim, sizes.slots)
    layout = DecodeLayout(rows + 2, pool.tables.shape[1] + 1, shape, on.device, dtype=dtype, kv_dtype=kept)
    q = torch.zeros(rows + 2, sizes.heads, sizes.dim, dtype=dtype, device=on.device)
    out = torch.zeros(rows + 2, sizes.heads * sizes.dim, dtype=dtype, device=on.device)
    recorder = EagerRecorder() if on.reduced else GraphRecorder(on.device)

    def attend() -> None:
        out.copy_(layout(q, pool.kv))

    replay = recorder.record(attend)
    wrong = 0
    for order in (list(range(rows)), list(reversed(range(rows)))):
        layout.fill([among[row].tokens - 1 for row in order], pool.tables[order])
        q[:rows].copy_(torch.cat([among[row].q for row in order]))
        replay()
        wrong += int((out[:rows] != expected[order]).any())
    return Check(
        f"{name}: the same bits recorded", not wrong, f"{wrong} of 2 replays differ" if wrong else ""
    )


def _moves(on: Device, sizes: Sizes, ops: Ops) -> Iterator[Check]:
    shape = (8, 2, 2, sizes.slots, sizes.kv_heads, sizes.dim)
    generator = torch.Generator().manual_seed(2)
    plain = torch.randn(shape, generator=generator).to(torch.float16)
    storage, expected = plain.to(on.device), plain.clone()
    some = sizes.slots // 2 + 1
    ops.copy_page(storage, 1, 5, some)
    expected[5, :, :, :some] = expected[1, :, :, :some]
    yield _same("copy_page", storage.cpu(), expected)
    ids = torch.tensor([6, 0, 3])
    moved = torch.zeros(3, plain[0].numel() * 2, dtype=torch.uint8, device=on.device)
    page_kernels.gather_pages(storage, ids.to(on.device), moved)
    yield _same("gather_pages", moved.cpu(), expected[ids].view(torch.uint8).view(3, -1))
    page_kernels.scatter_pages(storage, (ids + 1).to(on.device), moved)
    expected[ids + 1] = expected[ids].clone()
    yield _same("scatter_pages", storage.cpu(), expected)


def _same(name: str, found: Tensor, expected: Tensor) -> Check:
    equal = torch.equal(found, expected)
    return Check(name, equal, "" if equal else f"{int((found != expected).sum())} numbers differ")
