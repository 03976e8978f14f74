"""The KV manager: who holds which pages, and what of a session is cached.

Owner of page counts, pins, the radix tree and the block tables of *active* sessions. A session at
rest holds nothing: its full pages are in the tree, its last, partly filled page hangs there as a
tail, and all of it is evictable. Resuming is matching again, so dropping KV is always safe.

A page is written only while it is private (held once, not cached). Whoever must append to a shared
page gets a fresh one and a `PageCopy` in the plan (copy-on-write); the source stays pinned until
the plan has run.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from agentserve.core.block_table import BlockTable
from agentserve.core.nodes import Node
from agentserve.core.pages import PagePool
from agentserve.core.plan import PageCopy
from agentserve.core.radix import RadixTree
from agentserve.types import SessionId


class KVManager:
    """Pages of all KV groups for all sessions. Not thread-safe; pure."""

    def __init__(self, page_size: int, pages: tuple[int, ...], *, prefix_cache: bool = True) -> None:
        self.page_size = page_size
        self.pools = tuple(PagePool(count) for count in pages)
        self.prefix_cache = prefix_cache
        self.tree = RadixTree(page_size, len(pages), self._is_idle)
        self._tables: dict[SessionId, BlockTable] = {}
        self.tables: Mapping[SessionId, BlockTable] = self._tables  # of active sessions; only to be looked at
        self._pins: list[tuple[int, ...]] = []  # sources of copies in plans that have not run yet
        self._moving: dict[tuple[int, ...], int] = {}  # blocks that transfers read or write: pins of each
        self._marked: dict[bytes, tuple[int, ...]] = {}  # key -> block, of blocks with a mark
        self.evicted = 0  # full blocks taken out of the tree to make room

    # --- figures ---------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens that one session can have at most: the tightest pool, less one page for copy-on-write."""
        return (min(pool.pages for pool in self.pools) - 1) * self.page_size

    @property
    def available(self) -> int:
        """Blocks that can be had now, counting idle pages as evictable."""
        return min(pool.available for pool in self.pools)

    def blocks_of(self, session: SessionId) -> int:
        table = self._tables.get(session)
        return table.blocks if table else 0

    def cached_tokens(self, namespace: bytes, tokens: array[int]) -> int:
        """How many leading tokens have KV in the tree now. Looking is not using: it keeps nothing longer."""
        match = self.tree.match(namespace, tokens, len(tokens), touch=False)
        return len(match.pages[0]) * self.page_size + match.extra

    def needed_blocks(self, namespace: bytes, tokens: array[int]) -> int:
        """How many of the `available` blocks a session with these tokens would hold."""
        pages, pool = self.tree.match(namespace, tokens, len(tokens), touch=False).pages[0], self.pools[0]
        return -(-len(tokens) // self.page_size) - sum(pool.holds(page) > 0 for page in pages)

    def freed(self, session: SessionId, most: int) -> tuple[int, ...]:
        """Per KV group: pages that could be had if the session let go of its own, from its last one on; at
        most `most`. What somebody else or a transfer holds stays, and so does all before it."""
        return self._tables[session].freed(self.pools, most)

    # --- a session becomes active ------------------------------------------------------------

    def begin(self, session: SessionId, namespace: bytes, tokens: array[int]) -> int:
        """Give `session` a block table with all that is cached of `tokens`; returns how many tokens that is.

        The last token is never taken from the cache: its logits are needed.
        """
        if session in self._tables:
            raise RuntimeError(f"{session} has a block table already")
        if self.prefix_cache:
            match = self.tree.match(namespace, tokens, len(tokens) - 1)
            table = BlockTable(
                namespace, match.pages, len(match.pages[0]), match.donor, match.donor_node, match.extra
            )
        else:
            table = BlockTable(namespace, tuple(array("i") for _ in self.pools), 0)
        for pool, pages in zip(self.pools, table.pages, strict=True):
            for page in pages:
                pool.hold(page)
        if table.donor is not None:
            self._hold_block(table.donor)
        self._tables[session] = table
        return table.blocks * self.page_size + table.extra

    def missing_blocks(self, session: SessionId, length: int) -> int:
        """Blocks that `session` must still get to hold `length` tokens."""
        return -(-length // self.page_size) - self._tables[session].blocks

    # --- a session computes ------------------------------------------------------------------

    def reserve(self, session: SessionId, computed: int, length: int) -> list[PageCopy] | None:
        """Make positions computed .. length-1 writable. None if pages lack: then none was taken.

        Returns the copies that must run before this step's chunks.
        """
        table = self._tables[session]
        have = table.blocks
        partial = computed // self.page_size if computed % self.page_size else None
        shared = partial is not None and partial < have and not self._is_private(table, partial)
        wanted = -(-length // self.page_size) - have
        if wanted <= 0 and not shared:
            table.writable = have * self.page_size
            return []
        if table.donor is not None and self._adopt(table):
            wanted -= 1
        fresh = self._take(max(wanted, 0) + shared)
        if fresh is None:
            return None
        copies: list[PageCopy] = []
        if shared and partial is not None:
            source, target = table.block(partial), fresh.pop()
            table.put(partial, target)
            self._pin_copy(copies, source, target, computed % self.page_size)
        if table.donor is not None and fresh:
            self._pin_copy(copies, table.donor, fresh[0], table.extra)
            table.donor, table.donor_node, table.extra = None, None, 0
        for block in fresh:
            table.append(block)
        table.writable = table.blocks * self.page_size
        return copies

    def extend(self, sessions: Sequence[tuple[SessionId, int]]) -> bool:
        """`reserve` one token for each of these, with its computed tokens. False, and nothing was taken, if
        pages lack or if it takes more than a fresh page each."""
        tables = [self._tables[session] for session, _ in sessions]
        for table, (_, computed) in zip(tables, sessions, strict=True):
            if table.donor is not None or table.blocks * self.page_size != computed:
                return False
        if (fresh := self._take(len(tables))) is None:
            return False
        for table, block in zip(tables, fresh, strict=True):
            table.append(block)
            table.writable = table.blocks * self.page_size
        return True

    def _adopt(self, table: BlockTable) -> bool:
        """Take over a donor that is a tail, given whole and wanted by nobody else: no copy needed."""
        node, donor = table.donor_node, table.donor
        assert node is not None
        assert donor is not None
        # The donor may have been split, dropped or adopted by another since it was matched.
        if not node.tail or not node.blocks or table.extra != len(node.tokens):
            return False
        if tuple(pages[0] for pages in node.pages) != donor:
            return False
        if any(pool.holds(page) != 1 for pool, page in zip(self.pools, donor, strict=True)):
            return False
        self.tree.remove_tail(node)
        for pool, page in zip(self.pools, donor, strict=True):
            pool.uncache(page)
        table.append(donor)
        table.donor, table.donor_node, table.extra = None, None, 0
        return True

    def _pin_copy(
        self, copies: list[PageCopy], source: tuple[int, ...], target: tuple[int, ...], slots: int
    ) -> None:
        """Order a copy. The session's hold on the source becomes a pin until the plan has run."""
        self._pins.append(source)
        for group, (old, new) in enumerate(zip(source, target, strict=True)):
            copies.append(PageCopy(group, old, new, slots))

    def plan_done(self) -> None:
        """The plan has run (or failed): its copies no longer need their sources."""
        for block in self._pins:
            self._release_block(block)
        self._pins.clear()

    def table(self, session: SessionId) -> tuple[array[int], ...]:
        """Its pages, per group, as they are now. Not to be changed: who asks again gets the same."""
        return self._tables[session].shown()

    def seal(self, session: SessionId, tokens: array[int], computed: int) -> None:
        """Enter pages that have become full into the tree. A twin found there replaces our own page."""
        table = self._tables[session]
        if not self.prefix_cache or table.sealed >= computed // self.page_size:
            return
        size = self.page_size
        for index in range(table.sealed, computed // size):
            before = table.pages[0][index - 1] if index else None
            mine = table.block(index)
            if self.pools[0].is_cached(mine[0]):  # lent as a tail while the step that filled it ran
                self.tree.remove_tail(self.tree.node_of(mine[0]))
                for pool, page in zip(self.pools, mine, strict=True):
                    pool.uncache(page)
            theirs = self.tree.seal(table.namespace, before, tokens[index * size : (index + 1) * size], mine)
            if theirs == mine:
                for pool, page in zip(self.pools, mine, strict=True):
                    pool.cache(page)
                continue
            self._hold_block(theirs)
            table.put(index, theirs)
            self._release_block(mine)
        table.sealed = computed // size

    # --- a session rests or goes -------------------------------------------------------------

    def share_tail(self, session: SessionId, tokens: array[int], computed: int) -> None:
        """Let others read the session's last, partly filled page (fork). Whoever appends first copies."""
        table = self._tables[session]
        self.seal(session, tokens, computed)
        index, used = divmod(computed, self.page_size)
        if not self.prefix_cache or not used or index >= table.blocks or not self._is_private(table, index):
            return
        before = table.pages[0][index - 1] if index else None
        block = table.block(index)
        if self.tree.attach_tail(table.namespace, before, tokens[index * self.page_size : computed], block):
            table.writable = 0
            for pool, page in zip(self.pools, block, strict=True):
                pool.cache(page)

    def park(self, session: SessionId, tokens: array[int], computed: int) -> None:
        """The session goes to rest: what it computed stays, evictable; its table and holds end."""
        if session not in self._tables:
            return
        self.share_tail(session, tokens, computed)
        self.release(session)

    def release(self, session: SessionId) -> None:
        """End a session's table and holds. Pages that are not cached become free. Idempotent."""
        table = self._tables.pop(session, None)
        if table is None:
            return
        if table.donor is not None:
            self._release_block(table.donor)
        for index in range(table.blocks - 1, -1, -1):
            self._release_block(table.block(index))

    def evict_all(self) -> int:
        """Drop every idle block; returns how many."""
        return self._evict(self.pools[0].idle)

    # --- transfers ---------------------------------------------------------------------------

    @property
    def pinned(self) -> int:
        """Group 0 pages that are held by transfers alone: nobody's live KV, and not to be evicted."""
        return sum(self.pools[0].holds(block[0]) == pins for block, pins in self._moving.items())

    @property
    def stuck(self) -> int:
        """Idle blocks above others that transfers hold: of those available, not to be had until these end."""
        pool = self.pools[0]
        held = {block[0] for block in self._moving if pool.is_cached(block[0])}
        return sum(pool.holds(page) == 0 for page in self.tree.above(held)) if held else 0

    @property
    def moving(self) -> int:
        """Blocks pinned by transfers, whoever else holds them."""
        return len(self._moving)

    @property
    def copied(self) -> int:
        """Blocks that the plan under way copies from, whoever else holds them."""
        return len(self._pins)

    def pin(self, block: tuple[int, ...]) -> None:
        """Keep a cached block where it is until `unpin`: a transfer reads it, or puts others after it."""
        self._hold_block(block)
        self._moving[block] = self._moving.get(block, 0) + 1

    def unpin(self, block: tuple[int, ...]) -> None:
        pins = self._moving[block] - 1
        if pins:
            self._moving[block] = pins
        else:
            del self._moving[block]
        self._release_block(block)

    def take_pinned(self, count: int) -> list[tuple[int, ...]] | None:
        """`count` fresh blocks for a load to fill, pinned. None, and none taken, if they lack."""
        fresh = self._take(count)
        for block in fresh or ():
            self._moving[block] = 1
        return fresh

    def enter(
        self, namespace: bytes, before: tuple[int, ...] | None, tokens: array[int], block: tuple[int, ...]
    ) -> tuple[int, ...]:
        """A pinned block has been filled from below: enter it into the tree after `before`, which is pinned.

        Returns the block that the tree has for these tokens, pinned: an earlier twin, and then `block` is
        freed, or `block` itself.
        """
        theirs = self.tree.seal(namespace, before[0] if before else None, tokens, block)
        if theirs == block:
            for pool, page in zip(self.pools, block, strict=True):
                pool.cache(page)
            return block
        self.pin(theirs)
        self.unpin(block)
        return theirs

    def matched(self, namespace: bytes, tokens: array[int], limit: int) -> tuple[array[int], ...]:
        """Pages, per group, of the full blocks of tokens[:limit] that the tree has. Looking is not using."""
        return self.tree.match(namespace, tokens, limit, touch=False).pages

    def mark(self, key: bytes, block: tuple[int, ...], why: int) -> None:
        """A cached block can go without loss, for the reason `why` (`pages.COPIED`, `pages.DEVALUED`)."""
        page = block[0]
        if not self.pools[0].is_cached(page):
            return
        node = self.tree.node_of(page)
        self.pools[0].mark(page, why)
        self._marked[key] = block
        if node.pages[0][-1] == page:
            self.tree.queue.offer(node, anew=True)
            for child in node.children:  # a tail goes as what it hangs on goes
                self.tree.queue.offer(child, anew=True)

    def unmark(self, key: bytes, why: int) -> None:
        """The reason is gone. Nothing happens to a block without it."""
        block = self._marked.get(key)
        if block is not None:
            self.pools[0].mark(block[0], why, on=False)
            if not self.pools[0].marks(block[0]):
                del self._marked[key]

    # --- blocks ------------------------------------------------------------------------------

    def _take(self, count: int) -> list[tuple[int, ...]] | None:
        """`count` fresh blocks, evicting idle ones as needed. None, and none taken, if they lack."""
        if count > self.available:
            return None
        lacking = count - min([pool.free for pool in self.pools])
        if lacking > 0 and self._evict(lacking) < lacking:  # an idle page may stand above a pinned one
            return None
        return list(zip(*[pool.take(count) for pool in self.pools], strict=True))

    def _evict(self, count: int) -> int:
        """Evict so many idle blocks; how many there were."""
        evicted = self.tree.evict(count)
        for block, key in evicted:
            if key:
                self.evicted += 1
                self._marked.pop(key, None)
            for pool, page in zip(self.pools, block, strict=True):
                pool.uncache(page)
        return len(evicted)

    def _hold_block(self, block: tuple[int, ...]) -> None:
        for pool, page in zip(self.pools, block, strict=True):
            pool.hold(page)

    def _release_block(self, block: tuple[int, ...]) -> None:
        idle = False
        for pool, page in zip(self.pools, block, strict=True):
            idle |= pool.release(page)
        if idle:
            self.tree.offer(block[0])

    def _is_private(self, table: BlockTable, index: int) -> bool:
        return all(pool.is_private(pages[index]) for pool, pages in zip(self.pools, table.pages, strict=True))

    def _is_idle(self, node: Node) -> bool:
        held = [pool.holds(pages[-1]) for pool, pages in zip(self.pools, node.pages, strict=True)]
        return not any(held)

    def check(self) -> None:
        """Raise AssertionError unless every page is accounted for (INV-1, INV-2, INV-3)."""
        self.tree.check()
        for group, pool in enumerate(self.pools):
            pool.check()
            holds: dict[int, int] = {}
            for table in self._tables.values():
                held = list(table.pages[group]) + ([table.donor[group]] if table.donor else [])
                for page in held:
                    holds[page] = holds.get(page, 0) + 1
            for block in self._pins:
                holds[block[group]] = holds.get(block[group], 0) + 1
            for block, pins in self._moving.items():
                holds[block[group]] = holds.get(block[group], 0) + pins
            cached = {page for node in self.tree.nodes() for page in node.pages[group]}
            for page in range(pool.pages):
                assert pool.holds(page) == holds.get(page, 0), f"page {page}: holds differ"
                assert pool.is_cached(page) == (page in cached), f"page {page}: cached differs"
        for table in self._tables.values():
            assert table.shown() == table.pages, "plans are given other pages than there are"
            indices = range(table.sealed, table.writable // self.page_size)
            assert all(self._is_private(table, index) for index in indices), "writable, but not private"
        marked = {block[0] for block in self._marked.values()}
        for page in range(self.pools[0].pages):
            assert (page in marked) == (self.pools[0].marks(page) > 0), f"page {page}: marks differ"
