"""Recorded decode steps: buckets, padding, fixed buffers. The steps here are plain torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.ops import AttentionShape, GroupPages, Hidden, Span, StepGroup
from kernels.triton.graphs import MOST_ROWS, Buckets, DecodeGraphs
from kernels.triton.recorder import EagerRecorder, Work
from kernels.triton.step_attention import StepAttention

CPU = torch.device("cpu")
WIDTH, SLOTS, PAGES = 4, 4, 50
SHAPE = AttentionShape(heads=2, kv_heads=1, dim=2, slots=SLOTS)


class Sums:
    """Attention that tells what it was given: for each row its position and the sum of its pages."""

    def __init__(
        self, rows: int, pages: int, shape: AttentionShape, device: torch.device, kept: torch.dtype
    ) -> None:
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.tables = torch.full((rows, pages), 10**6)
        self.given = 0

    def fill(self, positions: Sequence[int], tables: Tensor) -> None:
        self.given = len(positions)
        self.positions.fill_(-1)
        self.positions[: self.given] = torch.tensor(positions, dtype=torch.int64)
        self.tables[: self.given, : tables.shape[1]] = tables

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        seen = torch.arange(self.tables.shape[1]) * SLOTS <= self.positions[:, None]
        return torch.stack((self.positions, (self.tables * seen).sum(dim=1)), dim=1)


@dataclass
class Steps:
    """A made-up step, and what it saw each time. Rows depend on their own inputs alone."""

    rows: list[int] = field(default_factory=list)

    def __call__(self, tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> Hidden:
        self.rows.append(len(tokens))
        out = torch.zeros(len(tokens), WIDTH)
        for group in groups:
            real = group.slots >= 0
            group.storage.view(-1)[group.slots[real]] = tokens[real].float()
            assert not real.logical_not().any() or not tokens[~real].any()
            out[:, :2] += group.attention(out, group.storage).float()
        out[:, 2], out[:, 3] = tokens.float(), positions.float()
        out[:, 0] = torch.where(tokens == 13, torch.nan, out[:, 0])
        return Hidden(out, out.isfinite().all(dim=-1))


@dataclass(frozen=True)
class Group:
    storage: Tensor
    slots: Tensor
    attention: StepAttention


class Rig:
    def __init__(self, rows: int = 5, context: int = 64, groups: int = 2) -> None:
        self.steps = Steps()
        self.storages = [torch.zeros(PAGES, SLOTS) for _ in range(groups)]
        pages = [GroupPages(storage, SHAPE) for storage in self.storages]
        buckets = Buckets((1, 2, 4, 8), (8, 32, context)) if rows > 4 else Buckets.up_to(rows, context)
        self.graphs = DecodeGraphs(
            self.steps, pages, buckets, recorder=EagerRecorder(), lay_out=Sums, hidden=(WIDTH, torch.float32)
        )
        self.recorded = list(self.steps.rows)
        self.steps.rows.clear()

    def groups(self, at: Sequence[int], spans: Sequence[Span] | None = None) -> list[Group]:
        tables = torch.tensor(
            [[row + page for page in range(max(at) // SLOTS + 1)] for row in range(len(at))]
        )
        slots = tables[torch.arange(len(at)), torch.tensor(at) // SLOTS] * SLOTS + torch.tensor(at) % SLOTS
        spans = spans or [Span(row, 1, position) for row, position in enumerate(at)]
        return [
            Group(storage, slots, StepAttention(SHAPE, spans, tables, no_layout)) for storage in self.storages
        ]

    def run(self, at: Sequence[int], first: int = 100) -> Hidden | None:
        tokens = torch.arange(first, first + len(at))
        return self.graphs.run(tokens, torch.tensor(at), self.groups(at))


def no_layout(shape: AttentionShape, spans: Sequence[Span], tables: Tensor, kept: torch.dtype) -> Sums:
    raise AssertionError("a recorded step needs no layout of its own")


def expected(at: Sequence[int], first: int = 100) -> list[list[float]]:
    """Two groups' positions and page sums, then token and position."""
    sums = [sum(row + page for page in range(position // SLOTS + 1)) for row, position in enumerate(at)]
    return [
        [2.0 * position, 2.0 * total, float(first + row), float(position)]
        for row, (position, total) in enumerate(zip(at, sums, strict=True))
    ]


def test_buckets_double_up_to_the_most_rows_and_lengthen_up_to_the_context() -> None:
    assert Buckets.up_to(5, 9000) == Buckets((1, 2, 4, 8), (2048, 8192, 9000))
    assert Buckets.up_to(1, 100) == Buckets((1,), (100,))
    assert Buckets.up_to(10_000, 2048).rows[-1] == MOST_ROWS
    buckets = Buckets.up_to(6, 5000)
    assert buckets.holding(3, 2048) == (4, 2048)
    assert buckets.holding(8, 2049) == (8, 5000)
    assert buckets.holding(9, 1) is None
    assert buckets.holding(1, 5001) is None


def test_every_bucket_is_recorded_the_largest_first_and_writes_nothing() -> None:
    rig = Rig()
    assert rig.recorded == [8] * 3 + [4] * 3 + [2] * 3 + [1] * 3
    assert not any(storage.any() for storage in rig.storages)
    assert "12 decode steps of up to 8 rows and 64 tokens recorded" in str(rig.graphs.recorded)


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_any_size_in_any_order_see_their_own_rows_only(seed: int) -> None:
    rig, order = Rig(), random.Random(seed)
    kept: list[tuple[Hidden, list[list[float]]]] = []
    for _ in range(12):
        at = [order.randrange(order.choice((8, 32, 64))) for _ in range(order.randint(1, 8))]
        first = order.randint(100, 200)
        found = rig.run(at, first)
        assert found is not None
        assert found.finite.all()
        kept.append((found, expected(at, first)))
    assert all(hidden.rows.tolist() == rows for hidden, rows in kept), "a later step wrote over an earlier"
    assert rig.graphs.runs.replayed == 12


def test_padding_writes_nothing_and_is_not_returned() -> None:
    rig = Rig()
    rig.run([7, 6, 5, 4, 3], 100)  # leaves five rows behind
    for storage in rig.storages:
        storage.zero_()
    found = rig.run([2, 1, 0], 100)
    assert rig.steps.rows == [8, 4]
    assert found is not None
    assert found.rows.shape == (3, WIDTH)
    for storage in rig.storages:
        assert sorted(storage.flatten().nonzero().flatten().tolist()) == [2, SLOTS + 1, 2 * SLOTS]


def test_a_row_that_is_not_finite_is_told() -> None:
    found = Rig().run([1, 2, 3], 12)
    assert found is not None
    assert found.finite.tolist() == [True, False, True]


def test_what_is_no_decode_step_or_fits_no_bucket_is_counted_and_left() -> None:
    rig = Rig()
    assert rig.run([0] * 9) is None
    assert rig.run([64]) is None
    assert (rig.graphs.runs.missed, rig.graphs.runs.launched) == (2, 0)
    chunk = rig.groups([0, 1], [Span(0, 2, 0)])
    backwards = rig.groups([0, 1], [Span(1, 1, 1), Span(0, 1, 0)])
    for groups in (chunk, backwards):
        assert rig.graphs.run(torch.tensor([1, 2]), torch.tensor([0, 1]), groups) is None
    assert (rig.graphs.runs.missed, rig.graphs.runs.launched) == (2, 2)
    assert (rig.graphs.runs.replayed, rig.steps.rows) == (0, [])


def test_pages_of_another_pool_are_not_written_through_a_recording() -> None:
    rig = Rig()
    rig.storages = [storage.clone() for storage in rig.storages]
    assert rig.run([1]) is None
    assert rig.graphs.runs.missed == 1


class Allocations(TorchDispatchMode):
    """The sizes of all new memory that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.sizes.append(tensor.numel())
        return out


class Addresses:
    """Records by noting where the step's inputs lie; its replays do nothing but compare."""

    nbytes = 0

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Work) -> Work:
        work()

        def replay() -> None:
            self.replays += 1

        return replay


class Quiet:
    """A layout whose filling allocates nothing."""

    def __init__(
        self, rows: int, pages: int, shape: AttentionShape, device: torch.device, kept: torch.dtype
    ) -> None:
        self.tables = torch.zeros(rows, pages, dtype=torch.int64)

    def fill(self, positions: Sequence[int], tables: Tensor) -> None:
        self.tables[: len(positions), : tables.shape[1]].copy_(tables)

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        return q[:, :2]


def test_a_replay_allocates_its_results_and_nothing_else() -> None:
    seen: list[tuple[int, ...]] = []

    def compute(tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> Hidden:
        inputs = (tokens, positions, *(group.slots for group in groups))
        seen.append(tuple(part.data_ptr() for part in inputs))
        return Hidden(torch.ones(len(tokens), WIDTH), torch.ones(len(tokens), dtype=torch.bool))

    rig, recorder = Rig(), Addresses()
    pages = [GroupPages(storage, SHAPE) for storage in rig.storages]
    buckets = Buckets((1, 2, 4), (8, 64))
    graphs = DecodeGraphs(
        compute, pages, buckets, recorder=recorder, lay_out=Quiet, hidden=(WIDTH, torch.float32)
    )
    assert len(seen) == 6
    assert len(set(seen)) == 1, "all buckets read the same buffers"
    for at in ([5, 6, 7], [60], [1, 2]):
        tokens, positions, groups = torch.arange(len(at)), torch.tensor(at), rig.groups(at)
        with Allocations() as made:
            assert graphs.run(tokens, positions, groups) is not None
        assert sorted(made.sizes) == [len(at), len(at) * WIDTH]
    assert (recorder.replays, len(seen)) == (3, 6), "a replay does not run the step's Python"
