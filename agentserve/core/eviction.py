"""Which idle leaf of the radix tree goes first.

Without tiers: the least recently used. With tiers an `order` says of each leaf (grade, worth): what
can go without loss is grade 0 and goes first; the rest goes by worth, the least first; equals by use.
Worths drift with time, so entries are graded anew once per step, and only if something of worth must go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from agentserve.core.nodes import Node

Grade = tuple[int, float]
_PLAIN: Grade = (0, 0.0)


class EvictionQueue:
    """A heap of leaves with lazy entries: what is gone, held or grown since is skipped when it comes up."""

    def __init__(self, evictable: Callable[[Node], bool]) -> None:
        self.order: Callable[[Node], Grade] | None = None
        self._evictable = evictable
        self._heap: list[tuple[int, float, int, int, Node]] = []  # (grade, worth, used, number, node)
        self._pushes = 0
        self._aged = False

    def age(self) -> None:
        """Worths may have changed."""
        self._aged = True

    def offer(self, node: Node, *, anew: bool = False) -> None:
        """`node` may have become evictable. anew: or may go earlier than was thought when it was queued."""
        if (anew or not node.queued) and self._evictable(node):
            self._push(node)

    def _push(self, node: Node) -> None:
        grade, worth = self.order(node) if self.order else _PLAIN
        self._pushes += 1
        node.queued = self._pushes
        heapq.heappush(self._heap, (grade, worth, node.used, self._pushes, node))

    def pop(self) -> Node | None:
        """The evictable leaf that goes first, no longer queued."""
        while self._heap:
            if self._aged and self._heap[0][0] > 0:
                self._grade_anew()
                continue
            grade, worth, used, number, node = heapq.heappop(self._heap)
            if node.queued != number:
                continue  # it has another place by now
            node.queued = 0
            if not self._evictable(node):
                continue  # it is offered again when that ends
            if node.used != used or (self.order and self.order(node) > (grade, worth)):
                self._push(node)
                continue
            return node
        return None

    def goes_on(self, node: Node) -> bool:
        """Whether `node`, popped and not offered again, would be the next to be popped if it were."""
        if not self._evictable(node):
            return False
        if not self._heap:
            return True
        grade, worth = self.order(node) if self.order else _PLAIN
        return not (self._aged and grade > 0) and (grade, worth, node.used) < self._heap[0][:3]

    def _grade_anew(self) -> None:
        self._aged = False
        entries, self._heap = sorted(self._heap), []
        for _, _, _, number, node in entries:
            if node.queued == number:
                node.queued = 0
                self.offer(node)

    def nodes(self) -> set[int]:
        """`id`s of the nodes that are queued."""
        return {id(node) for _, _, _, number, node in self._heap if node.queued == number}
