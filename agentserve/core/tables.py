"""Block tables: the pages of sessions that are active."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from agentserve.core.nodes import Node


@dataclass(slots=True)
class BlockTable:
    """The pages of one active session: `pages[g][i]` has its tokens i*page_size .. in KV group g."""

    namespace: bytes
    pages: tuple[array[int], ...]
    sealed: int  # leading blocks that are in the tree
    donor: tuple[int, ...] | None = None  # held until its slots are copied
    donor_node: Node | None = None
    extra: int = 0  # slots that the donor gives

    @property
    def blocks(self) -> int:
        return len(self.pages[0])
