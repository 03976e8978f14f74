"""Copies beside steps: whatever the device does first, a step reads what the order of its orders says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.late_streams import LateStreams, Refused
from tiering.stores.device_copies import DeviceCopies
from tiering.stores.host import HostStore
from tiering.stores.layer_parts import Run, cut
from tiering.stores.packing import PlainPacking
from tiering.stores.streams import Queue

PAGES, SLOTS = 6, 5
PATIENCE = 60.0  # seconds, only if something is broken
LAYERS = ((0, 2, 3), (1, 4))  # of the model, in two groups
LAYER_BYTES = (48, 32)
SIZES = [len(of) * nbytes for of, nbytes in zip(LAYERS, LAYER_BYTES, strict=True)]
BLOCK = sum(SIZES)
ORDER = sorted((number, group, at) for group, of in enumerate(LAYERS) for at, number in enumerate(of))
PAIRS = [
    (Queue.COMPUTE, Queue.IN),
    (Queue.OUT, Queue.IN),
    (Queue.IN, Queue.COMPUTE),
    (Queue.OUT, Queue.COMPUTE),
]


@dataclass
class Rig:
    """Pages and slots whose bytes are the number of what was last put there: all of one block are equal."""

    seed: int = 0
    packed: bool = False
    deaf: frozenset[tuple[Queue, Queue]] = frozenset()
    ahead: int = 1 << 20
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.host = HostStore(SLOTS, BLOCK)
        slab = np.asarray(self.host.view(0).base)
        self.streams = LateStreams(Random(self.seed + 1), slab, self.deaf)
        self.groups = [torch.zeros((PAGES, size), dtype=torch.uint8) for size in SIZES]
        self.copies = DeviceCopies(
            self.groups,
            LAYERS,
            self.streams,
            PlainPacking(),
            pack_below=BLOCK + 1 if self.packed else 0,
            part_bytes=1,
            ahead_bytes=self.ahead,
        )
        self.count = 0
        self.pages: list[int | None] = [0] * PAGES  # None: anything
        self.slots: list[int | None] = [0] * SLOTS
        for slot in range(SLOTS):
            self.host.view(slot).fill(0)

    def fresh(self) -> int:
        self.count += 1
        return self.count % 251

    def page(self, page: int) -> list[torch.Tensor]:
        return [group[page] for group in self.groups]

    def expect(self, what: str, value: int | None, parts: Sequence[torch.Tensor]) -> None:
        for part in parts:
            if value is not None and bool((part != value).any()):
                self.wrong.append(f"{what}: {part.tolist()} is not {value}")

    def load(self, moves: Sequence[tuple[int, int]]) -> None:
        """Slots to pages; the page that a group has of a block is its number."""
        for slot, page in moves:
            self.copies.write((page, page), self.host.view(slot))
        self.copies.settle()
        for slot, page in moves:
            self.pages[page] = self.slots[slot]

    def save(self, page: int, slot: int) -> None:
        self.copies.read((page, page), self.host.view(slot))
        self.copies.settle()
        self.slots[slot] = self.pages[page]
        self.expect("saved", self.pages[page], [torch.from_numpy(self.host.view(slot))])

    def fetch(self, pages: Sequence[int]) -> None:
        values = [self.fresh() for _ in pages]
        for page, value in zip(pages, values, strict=True):
            source = np.full(BLOCK, value, dtype=np.uint8)
            self.copies.write((page, page), source)
            source.fill(255)  # it was read
        self.copies.settle()
        for page, value in zip(pages, values, strict=True):
            self.pages[page] = value
            self.expect("fetched", value, self.page(page))

    def step(
        self, pages: Sequence[int], *, writes: int, stop: int = len(ORDER), whole: bool = False
    ) -> Iterator[None]:
        """Reads pages layer by layer, and then writes the last `writes` of them. Yields while it runs; ends
        after `stop` layers, as one that raises."""
        before = {page: self.pages[page] for page in pages}
        after = {page: self.fresh() for page in pages[len(pages) - writes :]}
        self.copies.begin(lambda: [pages] * len(LAYERS))
        if whole and self.copies.expecting:
            self.copies.wait_all()
        for number, group, at in ORDER[:stop]:
            if self.copies.expecting:
                self.copies.wait(group, at)
            self.streams.run(Queue.COMPUTE, partial(self.layer, number, group, at, before, after))
            if number == 1:
                yield
        self.copies.end()
        for page, value in after.items():
            self.pages[page] = value if stop == len(ORDER) else None

    def layer(
        self, number: int, group: int, at: int, before: dict[int, int | None], after: dict[int, int]
    ) -> None:
        """One layer of a step, when the device comes to it."""
        size = LAYER_BYTES[group]
        for page, value in before.items():
            run = self.groups[group][page, at * size : (at + 1) * size]
            self.expect(f"layer {number} of page {page}", value, [run])
            if page in after:
                run.fill_(after[page])


def history(seed: int, packed: bool, deaf: frozenset[tuple[Queue, Queue]] = frozenset()) -> list[str]:
    """Forty orders, at random; what went wrong."""
    rig = Rig(seed, packed, deaf, ahead=BLOCK * 3)
    choose = rig.random
    for _ in range(40):
        pages = choose.sample(range(PAGES), choose.randint(1, 3))
        kind = choose.choice(["load", "load", "save", "save", "fetch", "step", "step", "fail"])
        if kind == "load":
            rig.load([(choose.randrange(SLOTS), page) for page in pages])
        elif kind == "save":
            rig.save(pages[0], choose.randrange(SLOTS))
        elif kind == "fetch":
            rig.fetch(pages)
        elif kind == "fail":
            rig.streams.refuse = choose.randrange(6)
            slot = choose.randrange(SLOTS)
            try:
                if choose.random() < 0.5:
                    rig.load([(slot, page) for page in pages])
                else:
                    rig.slots[slot] = None
                    rig.save(pages[0], slot)
            except Refused:
                for page in pages:
                    rig.pages[page] = None
            rig.streams.refuse = None
        else:
            stop = choose.choice([len(ORDER), len(ORDER), choose.randrange(len(ORDER))])
            step = rig.step(pages, writes=choose.randint(0, 1), stop=stop, whole=choose.random() < 0.2)
            for _ in step:
                others = [page for page in range(PAGES) if page not in pages]
                rig.load([(choose.randrange(SLOTS), choose.choice(others))])
            if choose.random() < 0.5:
                rig.streams.mark(Queue.COMPUTE).wait()  # its results are read
        for _ in range(choose.randrange(3)):
            rig.streams.advance()
    assert rig.copies.drain(PATIENCE)
    rig.streams.finish()
    for page in range(PAGES):
        rig.expect(f"page {page} at the end", rig.pages[page], rig.page(page))
    for slot in range(SLOTS):
        rig.expect(f"slot {slot} at the end", rig.slots[slot], [torch.from_numpy(rig.host.view(slot))])
    return rig.wrong


@given(seed=st.integers(0, 1 << 30), packed=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_read_is_what_the_order_says(seed: int, packed: bool) -> None:
    assert not history(seed, packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_no_wait_can_be_left_out(pair: tuple[Queue, Queue], packed: bool) -> None:
    assert any(history(seed, packed, frozenset({pair})) for seed in range(60))


def loaded(rig: Rig) -> None:
    """A first load, which is waited for: now it is known how long they take, and that there are steps. Slot n
    holds n + 1."""
    rig.copies.begin(lambda: [])
    rig.copies.end()
    for slot in range(SLOTS):
        rig.host.view(slot).fill(slot + 1)
        rig.slots[slot] = slot + 1
    rig.load([(0, 0)])
    rig.expect("a first load", 1, rig.page(0))


def test_a_step_begins_while_later_layers_are_on_their_way() -> None:
    rig = Rig()
    loaded(rig)
    rig.load([(1, 1), (2, 2)])
    assert not rig.page(1)[0].any(), "it was answered, and nothing has been copied"
    rig.copies.begin(lambda: [[2], [2]])
    assert rig.copies.expecting
    rig.copies.wait(0, 0)
    mark = rig.streams.mark(Queue.COMPUTE)
    while not mark.reached:
        rig.streams._towards(mark)
    first, last = rig.groups[0][2, : LAYER_BYTES[0]], rig.groups[1][2, LAYER_BYTES[1] :]
    assert first.eq(3).all()
    assert not last.any()
    rig.copies.wait_all()
    rig.streams.mark(Queue.COMPUTE).wait()
    assert last.eq(3).all()
    assert not rig.copies.expecting


def test_as_long_as_no_step_says_what_it_touches_loads_are_waited_for() -> None:
    rig = Rig()
    for slot, page in ((1, 1), (2, 2), (3, 3)):
        rig.host.view(slot).fill(7)
        rig.load([(slot, page)])
        assert all(part.eq(7).all() for part in rig.page(page))


def test_a_step_waits_for_its_own_pages_only_and_for_each_part_once() -> None:
    rig = Rig()
    loaded(rig)
    rig.load([(1, 1)])
    rig.copies.begin(lambda: [[0, 2], [3]])
    assert not rig.copies.expecting
    rig.copies.end()
    rig.copies.begin(lambda: [[0], [1]])  # of the second group
    assert rig.copies.expecting
    rig.copies.wait(1, 0)  # layer 1 of the model
    before = len(rig.streams.queues[Queue.COMPUTE])
    rig.copies.wait(0, 0)  # layer 0, which has arrived before
    rig.copies.wait(1, 0)
    assert len(rig.streams.queues[Queue.COMPUTE]) == before
    rig.copies.wait_all()
    rig.copies.end()
    rig.copies.begin(lambda: [[1], [1]])
    assert not rig.copies.expecting, "its queue is behind that already"


def test_what_is_under_way_is_bounded() -> None:
    rig = Rig(ahead=2 * BLOCK)
    loaded(rig)
    for slot in range(1, 5):
        rig.load([(slot, slot)])
    arrived = [bool(rig.groups[1][page].ne(0).all()) for page in range(1, 5)]
    assert arrived[:2] == [True, True]


@pytest.mark.parametrize("packed", [False, True])
def test_slots_that_adjoin_cross_together(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots lie one behind the other where a block is whole cache lines."""
    rig = Rig(packed=packed)
    assert BLOCK % 64 == 16
    slab = np.zeros((SLOTS, BLOCK), dtype=np.uint8)
    rig.streams.pin(slab)
    for row in range(SLOTS):
        slab[row] = row + 1
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            copied.append(source.numel())
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    for row, page in ((3, 5), (1, 2), (2, 0)):
        rig.copies.write((page, page), slab[row])
    rig.copies.settle()
    rig.streams.finish()
    assert copied == ([3 * BLOCK] if packed else [nbytes for nbytes in _in_order() for _ in range(3)])
    for row, page in ((3, 5), (1, 2), (2, 0)):
        rig.expect("loaded", row + 1, rig.page(page))
    out = np.zeros((SLOTS, BLOCK), dtype=np.uint8)
    rig.copies.read((5, 2), out[0])
    rig.copies.settle()
    assert out[0].tolist() == [4] * SIZES[0] + [2] * SIZES[1]
    assert not rig.wrong


def _in_order() -> list[int]:
    return [LAYER_BYTES[group] for _, group, _ in ORDER]


def test_bytes_from_elsewhere_land_in_pinned_memory_however_many() -> None:
    rig = Rig()
    rig.copies._landing_rows = 2
    rig.fetch([4, 0, 3, 1, 5])
    assert not rig.wrong
    assert rig.copies.drain(0.0), "it has been waited for"


def test_what_could_not_be_copied_on_the_way_is_told_in_the_end() -> None:
    rig = Rig()
    rig.copies._landing_rows = 1
    rig.streams.refuse = 0
    source = np.full(BLOCK, 9, dtype=np.uint8)
    for page in (1, 2):  # the first is sent, and refused, when there is no room for the second
        rig.copies.write((page, page), source)
    with pytest.raises(Refused):
        rig.copies.settle()
    rig.fetch([1, 2])
    assert not rig.wrong


def test_reading_and_writing_in_one_go_keep_their_order() -> None:
    rig = Rig()
    loaded(rig)
    rig.copies.write((3, 3), rig.host.view(2))
    rig.copies.read((3, 3), rig.host.view(4))
    rig.copies.settle()
    assert set(rig.host.view(4).tolist()) == {3}


def test_pages_that_are_not_there_are_refused_when_they_are_asked_for() -> None:
    rig = Rig()
    with pytest.raises(IndexError, match="page 6 of 6"):
        rig.copies.read((0, PAGES), rig.host.view(0))
    with pytest.raises(IndexError, match="page -1"):
        rig.copies.write((-1, 0), rig.host.view(0))
    assert rig.copies.settle() == 0.0


def test_a_device_that_has_failed_runs_no_step() -> None:
    rig = Rig()
    loaded(rig)
    rig.load([(1, 1)])
    rig.streams.dead = True
    with pytest.raises(Refused):
        rig.copies.begin(lambda: [[5], [5]])
    assert not rig.copies.drain(PATIENCE)
    rig.streams.refuse = 0
    rig.streams.random = Random(0)
    with pytest.raises(Refused):
        rig.save(2, 2)
    rig.streams.dead = False
    rig.streams.finish()
    with pytest.raises(RuntimeError, match="copies of KV have failed: the device has failed"):
        rig.copies.begin(lambda: [[5], [5]])


def test_parts_hold_whole_layers_in_the_order_of_the_model() -> None:
    found = cut(SIZES, LAYERS, 1)
    assert [[(run.group, run.start, run.end, run.at) for run in part] for part in found.parts] == [
        [(0, 0, 48, 0)],
        [(1, 0, 32, 144)],
        [(0, 48, 96, 48)],
        [(0, 96, 144, 96)],
        [(1, 32, 64, 176)],
    ]
    assert found.part_of == ((0, 2, 3), (1, 4))
    found = cut(SIZES, LAYERS, 100)
    assert found.parts == ((Run(0, 0, 96, 0), Run(1, 0, 32, 144)), (Run(0, 96, 144, 96), Run(1, 32, 64, 176)))
    assert found.part_of == ((0, 0, 1), (0, 1))
    assert len(cut(SIZES, LAYERS, BLOCK).parts) == 1
