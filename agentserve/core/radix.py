"""The radix tree: which token runs have KV, and in which pages.

One root per namespace. A node holds a run of full pages and splits only at page edges, so a page
belongs to one node and, since every sequence of a root starts at position 0, the number of a page
in its sequence (`node.start + index`) is the same for all who share it. A *tail* is a leaf with
one page that is not full: the end of a session at rest. It can be read by anyone, is extended by
nobody, and never has children.

Matching goes on by token past the last full page: children are kept in the order of their first
page's tokens, so the one with the longest common prefix is a neighbour of the place where the
query would stand.

The tree knows pages, not tiers, and not who holds them: it asks the pool through `is_idle`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field

from agentserve.core.eviction import EvictionQueue
from agentserve.core.nodes import Match, Node
from tiering.keys import block_key


@dataclass(slots=True)
class RadixTree:
    page_size: int
    groups: int
    is_idle: Callable[[Node], bool]  # nobody holds the node's last page, in any group
    roots: dict[bytes, Node] = field(default_factory=dict)
    _where: dict[int, Node] = field(default_factory=dict)  # group 0 page -> its node
    queue: EvictionQueue = field(init=False)
    _ticks: int = 0

    def __post_init__(self) -> None:
        self.queue = EvictionQueue(self._evictable)

    # --- looking ---------------------------------------------------------------------------

    def root(self, namespace: bytes) -> Node:
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(None, 0, self.groups)
            node.keys.append(namespace)
        return node

    def match(self, namespace: bytes, tokens: array[int], limit: int, *, touch: bool = True) -> Match:
        """The longest run of tokens[:limit] that has KV. Splits nothing; `touch` marks it as just used."""
        found = Match(tuple(array("i") for _ in range(self.groups)))
        root = self.roots.get(namespace)
        if root is None:
            return found
        self._ticks += touch
        node, size, position = root, self.page_size, 0
        while True:
            if touch:
                node.used = self._ticks
            child = self._child(node, tokens[position : min(position + size, limit)], found)
            if child is None:
                if touch and found.donor_node is not None:
                    found.donor_node.used = self._ticks
                return found
            full = self._full_blocks(child, tokens, position, limit)
            for mine, theirs in zip(found.pages, child.pages, strict=True):
                mine.extend(theirs[:full])
            position += full * size
            if full < child.blocks:
                if touch:
                    child.used = self._ticks
                rest = child.tokens[full * size : (full + 1) * size]
                self._donate(found, child, full, common_prefix(rest, tokens[position:limit]))
                return found
            node = child

    def _child(self, node: Node, query: array[int], found: Match) -> Node | None:
        """The child whose first page is `query`; else None, with the best donor noted in `found`."""
        if not node.edges or not query:
            return None
        at = bisect_left(node.edges, query)
        if at < len(node.edges) and len(query) == self.page_size and node.edges[at] == query:
            return node.children[at]
        for near in (at - 1, at):
            if 0 <= near < len(node.edges):
                self._donate(found, node.children[near], 0, common_prefix(node.edges[near], query))
        return None

    def _full_blocks(self, child: Node, tokens: array[int], position: int, limit: int) -> int:
        """How many leading blocks of `child` equal tokens[position:limit] (its first one does)."""
        size = self.page_size
        high = min(child.blocks, (limit - position) // size)
        if tokens[position : position + high * size] == child.tokens[: high * size]:
            return high
        low = 1  # blocks known to be equal; `high` is known to differ
        while high - low > 1:
            middle = (low + high) // 2
            if (
                tokens[position + low * size : position + middle * size]
                == child.tokens[low * size : middle * size]
            ):
                low = middle
            else:
                high = middle
        return low

    @staticmethod
    def _donate(found: Match, node: Node, index: int, extra: int) -> None:
        if extra > found.extra:
            found.extra = extra
            found.donor = tuple(pages[index] for pages in node.pages)
            found.donor_node = node

    def node_of(self, page: int) -> Node:
        return self._where[page]

    def above(self, pages: Set[int]) -> Iterator[int]:
        """Group 0 pages between the root and the lowest of `pages`: these cannot be evicted before it."""
        ends = {self._where[page] for page in pages}
        full: set[Node] = set()
        for node in ends:
            parent = node.parent
            while parent is not None and parent not in full:
                full.add(parent)
                parent = parent.parent
        for node in full:
            yield from node.pages[0]
        for node in ends - full:
            run = node.pages[0]
            last = next(index for index in range(len(run) - 1, -1, -1) if run[index] in pages)
            yield from run[:last]

    # --- growing ---------------------------------------------------------------------------

    def seal(
        self, namespace: bytes, before: int | None, tokens: array[int], pages: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Enter the full block `tokens` in `pages` after the block of group 0 page `before`.

        Returns the pages that the tree has for it: `pages`, or an earlier twin's.
        """
        if before is None:
            node, index = self.root(namespace), -1
        else:
            node = self._where[before]
            index = self._index_of(node, before)
        self._ticks += 1
        node.used = self._ticks
        if index + 1 < node.blocks:  # the run goes on inside this node
            size = self.page_size
            if node.tokens[(index + 1) * size : (index + 2) * size] == tokens:
                return tuple(group[index + 1] for group in node.pages)
            node = self._split(node, index + 1)
        at = bisect_left(node.edges, tokens)
        if at < len(node.edges) and node.edges[at] == tokens:
            child = node.children[at]
            child.used = self._ticks
            return tuple(group[0] for group in child.pages)
        parent_key = node.keys[-1]
        if not node.children and node.parent is not None:
            grown = node  # a leaf that is not a root simply gets longer
        else:
            grown = Node(node, node.start + node.blocks, self.groups)
            grown.used = self._ticks
            node.edges.insert(at, tokens)
            node.children.insert(at, grown)
        grown.tokens.extend(tokens)
        grown.keys.append(block_key(parent_key, tokens.tobytes()))
        for group, page in zip(grown.pages, pages, strict=True):
            group.append(page)
        self._where[pages[0]] = grown
        return pages

    def attach_tail(
        self, namespace: bytes, before: int | None, tokens: array[int], pages: tuple[int, ...]
    ) -> bool:
        """Enter a block that is not full as a leaf. False if the tree has all of its tokens already."""
        node = self.root(namespace) if before is None else self._where[before]
        index = -1 if before is None else self._index_of(node, before)
        if index + 1 < node.blocks:
            size = self.page_size
            rest = node.tokens[(index + 1) * size : (index + 2) * size]
            if common_prefix(rest, tokens) == len(tokens):
                return False
            node = self._split(node, index + 1)
        at = bisect_left(node.edges, tokens)
        if at < len(node.edges) and common_prefix(node.edges[at], tokens) == len(tokens):
            return False  # a longer or equal neighbour serves as well
        self._ticks += 1
        tail = Node(node, node.start + node.blocks, self.groups, tail=True)
        tail.used = node.used = self._ticks
        tail.tokens.extend(tokens)
        for group, page in zip(tail.pages, pages, strict=True):
            group.append(page)
        node.edges.insert(at, tokens)
        node.children.insert(at, tail)
        self._where[pages[0]] = tail
        return True

    def _index_of(self, node: Node, page: int) -> int:
        pages = node.pages[0]
        return len(pages) - 1 if pages[-1] == page else pages.index(page)

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut `node` after `blocks` blocks. The head is a new node above; returns the head."""
        assert node.parent is not None
        size = self.page_size
        head = Node(node.parent, node.start, self.groups)
        head.used = node.used
        head.tokens = node.tokens[: blocks * size]
        head.pages = tuple(group[:blocks] for group in node.pages)
        head.keys = node.keys[:blocks]
        head.parent = node.parent
        at = bisect_left(node.parent.edges, head.tokens[:size])
        node.parent.children[at] = head
        for page in head.pages[0]:
            self._where[page] = head
        node.tokens = node.tokens[blocks * size :]
        node.pages = tuple(group[blocks:] for group in node.pages)
        node.keys = node.keys[blocks:]
        node.start += blocks
        node.parent = head
        head.edges.append(node.tokens[:size])
        head.children.append(node)
        return head

    # --- shrinking -------------------------------------------------------------------------

    def offer(self, page: int) -> None:
        """Group 0 page `page` has become idle: its node may now be evicted, if it is a leaf."""
        node = self._where.get(page)
        if node is not None:
            self.queue.offer(node)

    def _evictable(self, node: Node) -> bool:
        return bool(node.blocks) and not node.children and node.parent is not None and self.is_idle(node)

    def evict(self, count: int) -> list[tuple[tuple[int, ...], bytes]]:
        """Take out the `count` idle blocks that go first, leaves before parents and tail first, or as many as
        there are: of each its pages and its key (empty: it was not full)."""
        gone: list[tuple[tuple[int, ...], bytes]] = []
        while len(gone) < count and (node := self.queue.pop()) is not None:
            parent = node.parent
            while True:  # most often the next block of the same leaf is next
                key = b"" if node.tail else node.keys[-1]
                gone.append((self._drop_last(node), key))
                if not node.blocks or len(gone) == count or not self.queue.goes_on(node):
                    break
            if node.blocks:
                self.queue.offer(node)
            elif parent is not None:
                self.queue.offer(parent)
        return gone

    def remove_tail(self, tail: Node) -> None:
        """Take a tail out of the tree: its session goes on writing it."""
        parent = tail.parent
        assert tail.tail
        assert parent is not None
        self._drop_last(tail)
        self.queue.offer(parent)

    def _drop_last(self, node: Node) -> tuple[int, ...]:
        pages = tuple(group.pop() for group in node.pages)
        del self._where[pages[0]]
        if not node.tail:
            node.keys.pop()
        if node.blocks:
            del node.tokens[node.blocks * self.page_size :]
            return pages
        parent = node.parent
        assert parent is not None
        at = bisect_left(parent.edges, node.tokens[: self.page_size])
        assert parent.children[at] is node
        del parent.edges[at], parent.children[at]
        del node.tokens[:]
        if parent.parent is None and not parent.children:
            del self.roots[parent.keys[0]]  # namespaces come and go with tenants: keep no empty ones
        return pages

    # --- checking --------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def check(self) -> None:
        """Raise AssertionError if the tree's own rules are broken (INV-2)."""
        size, seen = self.page_size, 0
        queued = self.queue.nodes()
        for node in self.nodes():
            assert node.edges == sorted(node.edges), "children out of order"
            assert [child.tokens[:size] for child in node.children] == node.edges, "edge and child differ"
            assert len({edge.tobytes() for edge in node.edges}) == len(node.edges), "twin children"
            for page in node.pages[0]:
                assert self._where[page] is node, "a page points to another node"
                seen += 1
            for child in node.children:
                assert child.parent is node, "a child's parent is someone else"
                assert child.start == node.start + node.blocks, "a child starts at the wrong block"
            if node.parent is None:
                continue
            assert len(node.keys) == (0 if node.tail else node.blocks), "keys and pages differ"
            if node.tail:
                assert not node.children, "a tail has children"
                assert node.blocks == 1, "a tail is one page"
                assert 0 < len(node.tokens) < size, "a tail is full or empty"
            else:
                assert len(node.tokens) == node.blocks * size > 0, "tokens and pages differ"
            if not node.children and self.is_idle(node):
                assert id(node) in queued, "an evictable leaf is not in the heap"
        assert seen == len(self._where), "the index knows pages that the tree does not"


def common_prefix(a: array[int], b: array[int]) -> int:
    """Length of the longest common prefix."""
    short = min(len(a), len(b))
    if a[:short] == b[:short]:
        return short
    low, high = 0, short
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
