"""Nodes of the radix tree, and what matching gives."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


class Node:
    """A run of pages below `parent`. `pages[g][i]` holds block `start + i` of KV group g."""

    __slots__ = ("children", "edges", "keys", "pages", "parent", "queued", "start", "tail", "tokens", "used")

    def __init__(self, parent: Node | None, start: int, groups: int, *, tail: bool = False) -> None:
        self.parent = parent
        self.start = start
        self.tail = tail
        self.tokens: array[int] = array("i")
        self.pages: tuple[array[int], ...] = tuple(array("i") for _ in range(groups))
        self.keys: list[bytes] = []  # block key of each full page; a root holds its namespace digest
        self.edges: list[array[int]] = []  # first page's tokens of each child, sorted
        self.children: list[Node] = []  # in the order of `edges`
        self.used = 0  # when it was last matched or extended, in ticks of the tree
        self.queued = 0  # number of its entry in the eviction queue; 0: none

    @property
    def blocks(self) -> int:
        return len(self.pages[0])


@dataclass(slots=True)
class Match:
    """What the tree has of a token run: full blocks, then `extra` slots of a donor block."""

    pages: tuple[array[int], ...]
    donor: tuple[int, ...] | None = None  # the donor's page in each group
    donor_node: Node | None = None
    extra: int = 0
