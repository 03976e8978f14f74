"""Cutting pages into parts of some layers each, in the order in which a step comes to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PART_BYTES = 512 << 10  # of a block: smaller copies take longer to enqueue than to run


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes `start .. end` of a page of `group`; they begin at byte `at` of a block."""

    group: int
    start: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class LayerParts:
    parts: tuple[tuple[Run, ...], ...]
    part_of: tuple[tuple[int, ...], ...]  # by group and the layer's place in it: where it is in `parts`


def cut(page_bytes: Sequence[int], layers: Sequence[Sequence[int]], least: int = PART_BYTES) -> LayerParts:
    """Parts of at least `least` bytes of a block, but for the last.

    page_bytes: of each group; layers: each group's layers by their number in the model, ascending. A page is
    its layers one after the other (`agentserve.executor.pool.PAGE_LAYOUT`)."""
    sizes = [nbytes // len(of) for nbytes, of in zip(page_bytes, layers, strict=True)]
    order = sorted((number, group, at) for group, of in enumerate(layers) for at, number in enumerate(of))
    part_of = [[0] * len(of) for of in layers]
    cuts: list[list[tuple[int, int]]] = [[]]
    nbytes = 0
    for _, group, at in order:
        if nbytes >= least:
            cuts.append([])
            nbytes = 0
        cuts[-1].append((group, at))
        part_of[group][at] = len(cuts) - 1
        nbytes += sizes[group]
    starts = [sum(page_bytes[:group]) for group in range(len(page_bytes))]
    parts = []
    for members in cuts:
        runs = []
        for group in sorted({group for group, _ in members}):
            places = [at for of, at in members if of == group]  # neighbours: a group's layers come in order
            start, end = places[0] * sizes[group], (places[-1] + 1) * sizes[group]
            runs.append(Run(group, start, end, starts[group] + start))
        parts.append(tuple(runs))
    return LayerParts(tuple(parts), tuple(map(tuple, part_of)))
