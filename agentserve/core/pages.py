"""The page pool of one KV group: which pages are free, held, cached.

A page is in one of four conditions, and the pool is the only one who knows:

    free    nobody has it
    held    `holds > 0`: block tables and pins that read or write it
    idle    cached by the tree, held by nobody: evictable, always
    both    cached and held

An idle page may be marked: `COPIED` or `DEVALUED` (or both) says that it can go without loss. Marked
idle pages are counted (`spare`), so that nobody has to look for them.

The pool counts; it does not decide what goes. Only the KV manager calls it.
"""

from __future__ import annotations

from array import array

COPIED = 1  # a tier below has the same bytes
DEVALUED = 2  # nobody is expected to want them


class PagePool:
    """`pages` pages, numbered 0 .. pages-1."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"a KV pool needs at least 2 pages, got {pages}")
        self.pages = pages
        self.idle = 0
        self.spare = 0  # idle pages with a mark
        self._free = array("i", range(pages - 1, -1, -1))
        self._holds = array("i", bytes(4 * pages))
        self._cached = bytearray(pages)
        self._marks = bytearray(pages)  # of cached pages only

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> int:
        """Pages that somebody holds."""
        return self.pages - len(self._free) - self.idle

    @property
    def available(self) -> int:
        """Pages that can be had now: free ones, and idle ones by eviction."""
        return len(self._free) + self.idle

    def take(self, count: int) -> list[int]:
        """Free pages, each held once. The caller has made sure that there are so many."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holds[page] = 1
        return taken

    def hold(self, page: int) -> None:
        if self._holds[page] == 0:
            if not self._cached[page]:
                raise RuntimeError(f"page {page} is free: it cannot be held")
            self.idle -= 1
            self.spare -= self._marks[page] > 0
        self._holds[page] += 1

    def release(self, page: int) -> bool:
        """Undo one hold. True if the page became idle (cached, evictable)."""
        holds = self._holds[page] - 1
        if holds < 0:
            raise RuntimeError(f"page {page} released more often than held")
        self._holds[page] = holds
        if holds:
            return False
        if self._cached[page]:
            self.idle += 1
            self.spare += self._marks[page] > 0
            return True
        self._free.append(page)
        return False

    def cache(self, page: int) -> None:
        """The tree takes a held page into its books."""
        if self._cached[page] or not self._holds[page]:
            raise RuntimeError(f"page {page} cannot be cached: cached already, or held by nobody")
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        """The tree lets go of a page; an idle one becomes free."""
        if not self._cached[page]:
            raise RuntimeError(f"page {page} is not cached")
        self._cached[page] = 0
        if self._holds[page] == 0:
            self.idle -= 1
            self.spare -= self._marks[page] > 0
            self._free.append(page)
        self._marks[page] = 0

    def mark(self, page: int, why: int, *, on: bool = True) -> None:
        """Set or clear marks of a cached page."""
        if not self._cached[page]:
            raise RuntimeError(f"page {page} is not cached: it cannot be marked")
        before = self._marks[page]
        after = before | why if on else before & ~why
        self._marks[page] = after
        if self._holds[page] == 0:
            self.spare += (after > 0) - (before > 0)

    def marks(self, page: int) -> int:
        return self._marks[page]

    def is_private(self, page: int) -> bool:
        """Held once and not cached: whoever holds it may write it."""
        return self._holds[page] == 1 and not self._cached[page]

    def holds(self, page: int) -> int:
        return self._holds[page]

    def is_cached(self, page: int) -> bool:
        return bool(self._cached[page])

    def check(self) -> None:
        """Raise AssertionError if the books do not agree (INV-1)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert self.idle == sum(
            1 for page in range(self.pages) if self._cached[page] and not self._holds[page]
        ), "idle count is wrong"
        assert self.spare == sum(
            1 for page in range(self.pages) if self._marks[page] and not self._holds[page]
        ), "spare count is wrong"
        for page in range(self.pages):
            used = bool(self._cached[page]) or self._holds[page] > 0
            assert used != (page in free), f"page {page} is both free and used, or neither"
            assert self._cached[page] or not self._marks[page], f"page {page} is marked but not cached"
