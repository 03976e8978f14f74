"""Whether an LMDB data file is sound, and what can be read of one that is not.

LMDB looks at no more of a page than it needs, and believes it: of damage it makes an error, an abort
of the process, or, where a page says that it is another, a live page in its free list that a later
write overwrites. Here every page is looked at: that it is where it says, that its nodes are whole and
in order and in the range their branch promises, that a table has the entries it counts, and that each
page is used once, or free.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from agentserve.server.sessions.pages import (
    BIG,
    BY_NUMBER,
    HEADER,
    NOWHERE,
    NUMBER,
    OVERFLOW,
    SUBTREE,
    BadPage,
    Meta,
    Node,
    PageFile,
    Tree,
    node_at,
    nodes_of,
    tree_at,
)

_DEEPEST = 32  # as LMDB's cursors
_USED, _FREE, _BAD = 1, 2, 3
_LOST = (0, _BAD)

Row = tuple[bytes, bytes, bytes]
"""Table, name, value."""


class Survey:
    """Everything that one meta leads to. `problems` fills as pages are looked at."""

    def __init__(self, file: PageFile, meta: Meta) -> None:
        self.problems: list[str] = []
        self._file = file
        self._meta = meta
        self._pages = min(meta.last + 1, file.size // file.page_size)
        self._seen = bytearray(self._pages)
        self._free_sound = False
        self._seen[:2] = bytes([_USED] * min(2, self._pages))

    def rows(self) -> Iterator[Row]:
        """Those of all tables that can be read, then whether the free list is right."""
        tables = list(self._entries(self._meta.main, tables=True))
        for table, found in tables:
            tree = tree_at(found, 0)
            if tree.flags:
                self.problems.append(f"table {table[:20]!r} has flags {tree.flags}")
                continue
            for name, value in self._entries(tree):
                yield table, name, value
        self._check_free()

    def strays(self) -> Iterator[tuple[bytes, bytes]]:
        """After `rows`: name and value of what else lies on pages that are neither free nor were read.
        Whether it is a row, and of which table, its reader must find out; none where the free list cannot
        be believed, for then what was deleted would come back."""
        if not self._free_sound or _BAD not in self._seen:
            return
        for number in range(2, self._pages):
            if self._seen[number] not in _LOST:
                continue
            try:
                page = self._file.read(number)
            except BadPage:
                continue
            said = HEADER.unpack_from(page)[0]
            if said < self._pages and self._seen[said] in _LOST:
                yield from self._scraped(page)

    def _scraped(self, page: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Whatever could be nodes of a leaf."""
        count = min(max(0, (HEADER.unpack_from(page)[3] - 16) // 2), (len(page) - 16) // 2)
        for at in struct.unpack_from(f"<{count}H", page, 16):
            try:
                node = node_at(page, at, leaf=True)
                yield node.name, self._value(page, node)
            except BadPage:
                continue

    def _check_free(self) -> None:
        """Every page is used or free. Free ones may lie behind the end of the file: used for a moment, in
        one transaction, they were never written."""
        before = len(self.problems)
        listed: list[int] = []
        for _, value in self._entries(self._meta.free):
            count, *numbers = struct.unpack_from(f"<{max(1, len(value) // 8)}Q", value.ljust(8, b"\0"))
            if count != len(numbers) or len(value) % 8:
                self.problems.append("a part of the free list is not whole")
            listed += numbers
        behind: set[int] = set()
        for number in listed:
            if number in behind or not 1 < number <= self._meta.last or self._is_used(number):
                self.problems.append(f"page {number} is in the free list and should not be")
            elif number < self._pages:
                self._seen[number] = _FREE
            else:
                behind.add(number)
        self._free_sound = len(self.problems) == before
        known = self._pages - self._seen.count(0) + len(behind)
        if known != self._meta.last + 1 and not self.problems:
            self.problems.append(f"{self._meta.last + 1 - known} page(s) are neither used nor free")

    def _is_used(self, number: int) -> bool:
        return number < self._pages and self._seen[number] != 0

    def _entries(self, tree: Tree, tables: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """In order. `tables`: those that are trees themselves."""
        if tree.root == NOWHERE:
            if tree.entries:
                self.problems.append(f"a table of {tree.entries} entries is empty")
            return
        before, count, last = len(self.problems), 0, b""
        numbers = bool(tree.flags & BY_NUMBER)
        for page, node in self._leaves(tree.root, tree.depth, b"", None, numbers):
            count += 1
            name = _ordered(node.name, numbers)
            if count > 1 and name <= last:
                self.problems.append(f"{node.name[:40]!r} is out of order")
            last = name
            try:
                if bool(node.flags & SUBTREE) is not tables:
                    raise BadPage(f"{node.name[:40]!r} has flags {node.flags}")
                yield node.name, self._value(page, node)
            except BadPage as error:
                self.problems.append(str(error))
        if count != tree.entries and len(self.problems) == before:
            self.problems.append(f"{count} entries where there should be {tree.entries}")

    def _leaves(
        self, number: int, depth: int, low: bytes, high: bytes | None, numbers: bool
    ) -> Iterator[tuple[bytes, Node]]:
        """The nodes of all leaves below a page, whose names are in [low, high)."""
        try:
            if not 0 < depth <= _DEEPEST:
                raise BadPage(f"page {number} is too deep in its tree")
            self._take(number)
            page = self._file.read(number)
            nodes = nodes_of(page, number, leaf=depth == 1)
        except BadPage as error:
            self.problems.append(str(error))
            if number < self._pages:
                self._seen[number] = _BAD
            return
        edges = [_ordered(node.name, numbers) for node in nodes]
        if depth > 1:
            edges[0] = low  # that of the first child is not kept
        for at, node in enumerate(nodes):
            if edges[at] < low or (high is not None and edges[at] >= high):
                self.problems.append(f"{node.name[:40]!r} is on page {number}, where nobody looks for it")
            if depth == 1:
                yield page, node
            else:
                end = edges[at + 1] if at + 1 < len(edges) else high
                yield from self._leaves(node.child, depth - 1, edges[at], end, numbers)

    def _value(self, page: bytes, node: Node) -> bytes:
        if not node.flags & BIG:
            return page[node.at : node.at + node.size]
        (number,) = NUMBER.unpack_from(page, node.at)
        needed = -(-(16 + node.size) // self._file.page_size)
        first = self._file.read(number)
        said, _, flags = struct.unpack_from("<QHH", first)
        (pages,) = struct.unpack_from("<I", first, 12)
        if (said, flags & 15) != (number, OVERFLOW) or pages < needed:
            raise BadPage(f"page {number} is not the {needed} overflow page(s) it should be")
        self._take(number, pages)
        return self._file.read(number, needed)[16 : 16 + node.size]

    def _take(self, number: int, pages: int = 1) -> None:
        if number + pages > self._pages:
            raise BadPage(f"page {number} is beyond the end of the file")
        if any(self._seen[number : number + pages]):
            raise BadPage(f"page {number} is used twice")
        self._seen[number : number + pages] = bytes([_USED]) * pages


def _ordered(name: bytes, number: bool) -> bytes:
    """A name as it compares: numbers are kept little-endian."""
    return name[::-1] if number else name
