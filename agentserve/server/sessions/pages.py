"""Pages of an LMDB data file, read without LMDB.

The format is that of LMDB 0.9 (`lmdb.h`, `mdb.c` of liblmdb, data version 1), little-endian, 64 bit:
pages 0 and 1 are *metas*, written in turn, each naming the roots of the free list and of the table of
tables. A page begins with its number, flags, and the bounds of its free space; after that offsets of
its nodes. A node of a leaf has its value, or the number of the overflow pages that have it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_MAGIC, _VERSION = 0xBEEFC0DE, 1
HEADER = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # size of the value, or the child's number (48 bits); flags; size of the name
_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_META = struct.Struct("<IIQQ")  # magic, version, address, map size; two trees, last page, transaction
_LAST = struct.Struct("<QQ")
NUMBER = struct.Struct("<Q")
_BRANCH, _LEAF, OVERFLOW, _METAPAGE = 1, 2, 4, 8
BIG, SUBTREE = 1, 2  # flags of a node
BY_NUMBER = 8  # flag of the free list: its names are numbers
_ONE_FILE = 0x4000  # another, which says how the environment was opened
NOWHERE = 2**64 - 1
_SIZES = (4096, 8192, 16384, 32768, 65536)


class BadPage(ValueError):
    """A page, or what hangs on it, cannot be believed; one line."""


@dataclass(frozen=True, slots=True)
class Tree:
    flags: int
    depth: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class Meta:
    page_size: int
    last: int  # number of the last page
    transaction: int | None  # None: it was made up
    free: Tree
    main: Tree


@dataclass(frozen=True, slots=True)
class Node:
    child: int  # of a branch
    size: int  # of a leaf's value
    flags: int
    name: bytes
    at: int  # where the value begins in its page
    end: int


class PageFile:
    """One file, open for reading. OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._file).st_size
        for self.page_size in reversed(_SIZES):  # the smallest, where no meta says
            self._metas = [self._meta(number, self.page_size) for number in (0, 1)]
            if self._metas != [None, None]:
                break

    def __enter__(self) -> PageFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    @property
    def metas(self) -> list[Meta]:
        """Those that can be believed, the newest first."""
        return sorted((meta for meta in self._metas if meta), key=lambda meta: -(meta.transaction or 0))

    def roots(self) -> Iterator[Meta]:
        """A meta for every page that could be a table of tables, and was or is one."""
        last = self.size // self.page_size - 1
        nothing = Tree(BY_NUMBER, 0, 0, NOWHERE)
        for number in range(2, last + 1):
            try:
                nodes = nodes_of(self.read(number), number, leaf=True)
            except BadPage:
                continue
            if all(node.flags == SUBTREE for node in nodes):
                yield Meta(self.page_size, last, None, nothing, Tree(0, 1, len(nodes), number))

    def head_problem(self) -> str | None:
        """What is wrong with the metas or the file's size; None: nothing."""
        if self.size == 0:
            return "the file is empty"
        for number, meta in enumerate(self._metas):
            if meta is None:
                return f"meta page {number} is damaged, so what was written last may be missing"
        newest, other = self.metas
        if (newest.transaction or 0) - (other.transaction or 0) > 1:
            return f"its meta pages are of transactions {other.transaction} and {newest.transaction}"
        return None

    def read(self, number: int, pages: int = 1) -> bytes:
        """BadPage where there is no such page or the disk does not give it."""
        start, length = number * self.page_size, pages * self.page_size
        if start + length > self.size:
            raise BadPage(f"page {number} is beyond the end of the file")
        try:
            data = os.pread(self._file, length, start)
        except OSError as error:
            raise BadPage(f"page {number} cannot be read ({error.strerror})") from None
        if len(data) != length:
            raise BadPage(f"page {number} cannot be read whole")
        return data

    def _meta(self, number: int, page_size: int) -> Meta | None:
        try:
            data = os.pread(self._file, 256, number * page_size)
        except OSError:
            return None
        if len(data) < 256:
            return None
        said, _, flags, _, _ = HEADER.unpack_from(data)
        magic, version, address, _ = _META.unpack_from(data, 16)
        size = _TREE.unpack_from(data, 40)[0]
        free, main = tree_at(data, 40), tree_at(data, 88)
        last, transaction = _LAST.unpack_from(data, 136)
        known = (said, flags & _METAPAGE, magic, version, address, size, free.flags & ~_ONE_FILE, main.flags)
        if known != (number, _METAPAGE, _MAGIC, _VERSION, 0, page_size, BY_NUMBER, 0):
            return None
        return Meta(page_size, last, transaction, free, main)


def tree_at(data: bytes, at: int) -> Tree:
    if len(data) - at < _TREE.size:
        return Tree(-1, 0, 0, NOWHERE)
    _, flags, depth, _, _, _, entries, root = _TREE.unpack_from(data, at)
    return Tree(flags, depth, entries, root)


def nodes_of(page: bytes, number: int, *, leaf: bool) -> list[Node]:
    """The nodes of a page, which fill it from `upper` to its end without a gap. BadPage."""
    said, _, flags, lower, upper = HEADER.unpack_from(page)
    if (said, flags & 15) != (number, _LEAF if leaf else _BRANCH):
        raise BadPage(f"page {number} says that it is page {said} with flags {flags}")
    count = (lower - 16) // 2
    if count < 1 or lower % 2 or not lower <= upper <= len(page):
        raise BadPage(f"page {number} has no sound bounds")
    found, filled, lowest = [], 0, len(page)
    for at in struct.unpack_from(f"<{count}H", page, 16):
        node = node_at(page, at, leaf=leaf)
        whole = node.end - at
        found.append(node)
        filled, lowest = filled + whole + whole % 2, min(lowest, at)
    if lowest != upper or filled != len(page) - upper:
        raise BadPage(f"page {number} has nodes that overlap, or a gap between them")
    return found


def node_at(page: bytes, at: int, *, leaf: bool) -> Node:
    if not 16 <= at <= len(page) - 8:
        raise BadPage("a node outside of its page")
    low, high, flags, length = _NODE.unpack_from(page, at)
    size, start = low | high << 16, at + 8 + length
    inside = 0 if not leaf else 8 if flags & BIG else size
    if start + inside > len(page):
        raise BadPage("a node that is not whole")
    return Node(size | flags << 32, size, flags, page[at + 8 : start], start, start + inside)
