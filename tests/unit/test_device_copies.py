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
        self.copies.begin(lambda: [set(pages)] * len(LAYERS))
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
