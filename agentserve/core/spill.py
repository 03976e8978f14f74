"""Spills: carrying out what the policy decided for sessions at rest, block by block.

HOST: every full block on the device gets a copy in the host. DISK: and from there one on the disk. A
spill goes on as transfers end: saves pin at most a share of the pool, writes a share of the host, and
neither waits for the other. What finds no room below stays where it is; dropping it is safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known, Ledger
from agentserve.core.pages import COPIED
from agentserve.messages import pack_tokens
from agentserve.types import SessionId
from tiering.manager import TierManager
from tiering.policy.base import Choice
from tiering.types import Block, Tier, Transfer

SAVE_SHARE = 4  # saves are ordered while transfers pin less than one page in so many


@dataclass(slots=True, eq=False)
class Spill:
    known: Known
    to_disk: bool
    saved: int = 0  # leading blocks that need no save any more
    written: int = 0  # leading blocks that need no write any more
    full: bool = False  # the host has no room for the next one


class Spills:
    def __init__(self, kv: KVManager, manager: TierManager, ledger: Ledger) -> None:
        self._kv = kv
        self._manager = manager
        self._ledger = ledger
        self._spills: dict[SessionId, Spill] = {}

    def begin(self, known: Known, choice: Choice, now: float) -> None:
        if self._manager.host_slots:
            self._spills[known.id] = Spill(known, choice is Choice.DISK)
            self.go_on(now)

    def stop(self, session: SessionId) -> None:
        """Order nothing more for it. What is in flight arrives."""
        self._spills.pop(session, None)

    def go_on(self, now: float) -> None:
        """Order what there is room for now."""
        over = [spill.known.id for spill in self._spills.values() if self._advance(spill, now)]
        for session in over:
            del self._spills[session]
        if not self._manager.moving:
            self._spills.clear()  # nothing will end that could make room

    def _advance(self, spill: Spill, now: float) -> bool:
        """True if there is nothing left to order for it."""
        known = spill.known
        path = self._kv.matched(known.namespace, known.tokens, len(known.tokens))
        if not spill.full and spill.saved < len(path[0]):
            self._save(spill, path)
        done = spill.full or spill.saved >= len(path[0])
        if not spill.to_disk:
            return done
        return self._write(spill, now) and done

    def _save(self, spill: Spill, path: tuple[array[int], ...]) -> None:
        kv, manager, known = self._kv, self._manager, spill.known
        room = min(pool.pages for pool in kv.pools) // SAVE_SHARE - kv.moving
        end = spill.saved
        fresh: list[Block] = []
        while end < len(path[0]):
            key = self._ledger.key(known, end)
            pages = tuple(group[end] for group in path)
            if manager.copied(key):
                kv.mark(key, pages, COPIED)
            elif not manager.has(key, Tier.HOST, arriving=True):
                if len(fresh) >= room:
                    break
                fresh.append(self._block(known, end, pages))
            end += 1
        accepted = manager.save(fresh, self._ledger.standing(known, Tier.HOST))
        for block in fresh[:accepted]:
            kv.pin(block.pages)
        spill.full = accepted < len(fresh)
        spill.saved = end

    def _write(self, spill: Spill, now: float) -> bool:
        """Write what is in the host by now. True if nothing is left to write."""
        manager, known = self._manager, spill.known
        size, end = self._kv.page_size, spill.written
        batch: list[Block] = []
        blocks = len(known.tokens) // size
        while end < blocks:
            key = self._ledger.key(known, end)
            if not manager.has(key, Tier.DISK, arriving=True):
                if not manager.has(key, Tier.HOST):
                    break
                batch.append(self._block(known, end, ()))
            end += 1
        accepted = manager.write(batch, self._ledger.standing(known, Tier.DISK), now)
        if accepted < len(batch):
            key = batch[accepted].key
            spill.written = known.keys.index(key, spill.written)
            return False
        spill.written = end
        if end < blocks and manager.has(self._ledger.key(known, end), Tier.HOST, arriving=True):
            return False  # its save is under way
        return end == blocks or end >= spill.saved or spill.full

    def _block(self, known: Known, index: int, pages: tuple[int, ...]) -> Block:
        size = self._kv.page_size
        parent = self._ledger.key(known, index - 1) if index else known.namespace
        tokens = pack_tokens(known.tokens[index * size : (index + 1) * size])
        return Block(self._ledger.key(known, index), parent, tokens, pages)

    def finished(self, transfer: Transfer, ok: Sequence[bool]) -> None:
        """A save has ended: its pages are pinned no more, and those with a copy may go."""
        for block, good in zip(transfer.blocks, ok, strict=True):
            if good:
                self._kv.mark(block.key, block.pages, COPIED)
            self._kv.unpin(block.pages)
