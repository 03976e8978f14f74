"""The block table of one active session: which pages hold its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.core.nodes import Node
from agentserve.core.pages import PagePool


@dataclass(slots=True)
class BlockTable:
    """The pages of one active session: `pages[g][i]` has its tokens i*page_size .. in KV group g."""

    namespace: bytes
    pages: tuple[array[int], ...]
    sealed: int  # leading blocks that are in the tree
    donor: tuple[int, ...] | None = None  # held until its slots are copied
    donor_node: Node | None = None
    extra: int = 0  # slots that the donor gives
    writable: int = 0  # positions up to here that have no KV yet can be written as they are
    _shown: tuple[array[int], ...] | None = None  # what plans were given, while it is unchanged

    @property
    def blocks(self) -> int:
        return len(self.pages[0])

    def block(self, index: int) -> tuple[int, ...]:
        return tuple(pages[index] for pages in self.pages)

    def put(self, index: int, block: tuple[int, ...]) -> None:
        """Another page, or other pages, in the place of what is there."""
        for pages, page in zip(self.pages, block, strict=True):
            pages[index] = page
        self._shown = None

    def append(self, block: tuple[int, ...]) -> None:
        for pages, page in zip(self.pages, block, strict=True):
            pages.append(page)
        self._shown = None

    def freed(self, pools: Sequence[PagePool], most: int) -> tuple[int, ...]:
        """Per KV group: how many of its pages, from the last on, nobody else holds; at most `most`."""
        counts = []
        for pool, pages in zip(pools, self.pages, strict=True):
            count = 0
            while count < min(most, len(pages)) and pool.holds(pages[-1 - count]) == 1:
                count += 1
            counts.append(count)
        return tuple(counts)

    def shown(self) -> tuple[array[int], ...]:
        """The pages as they are now, for plans: nobody changes them, and who asks again gets the same."""
        if self._shown is None:
            self._shown = tuple(pages[:] for pages in self.pages)
        return self._shown
