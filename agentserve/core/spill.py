"""Spills: carrying out what the policy decided for sessions at rest, block by block.

HOST: every full block on the device gets a copy in the host. DISK: and from there one on the disk. A
spill goes on as transfers end: saves pin at most a share of the pool, writes a share of the host, and
neither waits for the other. What finds no room below stays where it is; dropping it is safe. What a disk
that fails did not take is tried again when writes are.

What a turn that was preempted has is saved from its head, while who needs pages takes them from its tail: and
never so much at once that those who run could lack one for it (`headroom`), or saving it would cost another
turn its seat.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known, Ledger, Stage
from agentserve.core.pages import COPIED
from agentserve.core.restore import LOAD_SHARE
from agentserve.messages import pack_tokens
from agentserve.types import SessionId
from tiering.manager import TierManager
from tiering.policy.base import Choice
from tiering.types import Block, Move, Tier, Transfer

SAVE_SHARE = 4  # saves are ordered while these pin less than one page in so many


@dataclass(slots=True, eq=False)
class Spill:
    known: Known
    to_disk: bool
    free_only: bool = False  # only into slots that are free
    pressed: bool = False  # of a turn that was preempted
    saved: int = 0  # leading blocks that need no save any more
    written: int = 0  # leading blocks that need no write any more
    full: bool = False  # nothing is left to save, or the host has no room for it
    last: int | None = None  # nothing is left to order: the transfer that was ordered last by then


class Spills:
    def __init__(self, kv: KVManager, manager: TierManager, ledger: Ledger) -> None:
        self._kv = kv
        self._manager = manager
        self._ledger = ledger
        self._spills: dict[SessionId, Spill] = {}
        self.headroom = 0  # blocks that are not to be pinned for turns that were preempted: one each may need
        self.swapped = 0  # blocks that were ordered to be saved for these
        self.next_try: float | None = None  # when to go on, if nothing happens before

    def begin(self, known: Known, choice: Choice, now: float, *, free_only: bool = False) -> None:
        """free_only: nobody else's copies make room for these. Where the host only stages, to the disk."""
        if self._manager.host_slots:
            to_disk = choice is Choice.DISK or self._manager.staging
            pressed = known.stage is Stage.WAITING
            spill = self._spills[known.id] = Spill(known, to_disk, free_only, pressed)
            self._order((spill,), now)  # for the others nothing has happened

    @property
    def pressed(self) -> bool:
        """Is there one of a turn that was preempted that has not been saved yet?"""
        return any(spill.pressed and not spill.full for spill in self._spills.values())

    def stop(self, session: SessionId) -> None:
        """Order nothing more for it. What is in flight arrives."""
        self._spills.pop(session, None)

    def abandon(self) -> None:
        """Somebody's blocks were given up: take back the copies in the making of those that nobody values."""
        flights = self._manager.flights
        for transfer in flights:
            spills = transfer.move in (Move.SAVE, Move.WRITE)
            if spills and not any(self._ledger.valued(block.key) for block in transfer.blocks):
                flights.recall(transfer.id)

    def go_on(self, now: float) -> None:
        """Order what there is room for now: transfers have ended, or the disk is tried again."""
        self._order(list(self._spills.values()), now)

    def _order(self, spills: Sequence[Spill], now: float) -> None:
        manager = self._manager
        paused = manager.disk_back > now
        # Writes first: what they read is pinned then, and saves cannot take its slots.
        for spill in spills if not paused else ():
            if not spill.to_disk or spill.last is not None:
                continue
            if manager.write_room < 1:
                break
            if self._write(spill, manager.write_room, now):
                spill.last = manager.flights.last
        for spill in spills if not (paused and manager.staging) else ():
            if spill.full or (spill.free_only and not manager.host_free):
                continue
            room = self._save_room
            if room < 1:
                break
            self._save(spill, min(room, manager.host_free) if spill.free_only else room)
        self._close(spills)
        if not manager.moving:  # nothing will end that could make room
            self._spills = {
                name: spill
                for name, spill in self._spills.items()
                if (spill.to_disk and paused) or (spill.pressed and not spill.full)
            }
        waits = paused and any(spill.to_disk for spill in self._spills.values())
        self.next_try = manager.disk_back if waits else None

    def _close(self, spills: Sequence[Spill]) -> None:
        """End those that have nothing left to order, once all that they count on has come true: till then
        it may fail, or have been taken back before, and is ordered again."""
        flights = self._manager.flights
        for spill in spills:
            if spill.full and not spill.to_disk and spill.last is None:
                spill.last = flights.last
            if spill.last is not None and spill.last < flights.oldest:
                del self._spills[spill.known.id]

    @property
    def _save_room(self) -> int:
        """Blocks that may be ordered to be saved now.

        Loads pin pages too, but only one that hangs is a reason to wait: what is not saved before the next
        step is lost to whoever enters.
        """
        flights, moving = self._manager.flights, self._kv.moving
        saving = moving if flights.recalling else flights.blocks(Move.SAVE)
        pages = min(pool.pages for pool in self._kv.pools)
        return min(pages // SAVE_SHARE - saving, pages // LOAD_SHARE - moving, self._manager.save_room)

    def _save(self, spill: Spill, room: int) -> None:
        """Save the next blocks, at most `room`."""
        kv, manager, known = self._kv, self._manager, spill.known
        path = kv.matched(known.namespace, known.tokens, len(known.tokens))
        have, end = len(path[0]), spill.saved
        first = end
        if spill.pressed:
            room = min(room, self._room_beside(path[0][:end]))
            if room < 1:
                return
        keys = self._ledger.keys(known, have)
        fresh: list[Block] = []
        places: list[int] = []
        while end < have:
            key = keys[end]
            pages = tuple(group[end] for group in path)
            if manager.copied(key):
                kv.mark(key, pages, COPIED)
            elif not manager.has(key, Tier.HOST, arriving=True):
                if len(fresh) >= room:
                    break
                if fresh and known.weight(end) < known.weight(first):
                    break  # what weighs less makes less room
                first = end if not fresh else first
                fresh.append(self._block(known, end, pages))
                places.append(end)
            end += 1
        accepted = 0
        if fresh:
            accepted = manager.save(fresh, self._ledger.standing_of(known, first, Tier.HOST))
        for block in fresh[:accepted]:
            kv.pin(block.pages)
        if spill.pressed:
            self.swapped += accepted
        short = accepted < len(fresh)
        spill.saved = places[accepted] if short else end
        # A staging area has room again as writes end.
        spill.full = not manager.staging if short else end >= have

    def _room_beside(self, before: array[int]) -> int:
        """Blocks that can be pinned so that each turn that runs still finds a page. before: pages that these
        would keep from being evicted, too."""
        idle = sum(self._kv.pools[0].holds(page) == 0 for page in before)
        return self._kv.available - self._kv.stuck - idle - self.headroom

    def _write(self, spill: Spill, room: int, now: float) -> bool:
        """Write the next blocks that are in the host, at most `room`. True if nothing is left to write."""
        manager, known, end = self._manager, spill.known, spill.written
        blocks = len(known.tokens) // self._kv.page_size
        keys = self._ledger.keys(known, blocks)
        batch: list[Block] = []
        places: list[int] = []
        while end < blocks and len(batch) < room:
            if not manager.has(keys[end], Tier.DISK, arriving=True):
                if not manager.has(keys[end], Tier.HOST):
                    break
                if batch and known.weight(end) < known.weight(places[0]):
                    break  # as above
                batch.append(self._block(known, end, ()))
                places.append(end)
            end += 1
        if batch:
            accepted = manager.write(batch, self._ledger.standing_of(known, places[0], Tier.DISK), now)
            if accepted < len(batch):
                spill.written = places[accepted]
                return False
        spill.written = end
        if end == blocks:
            return True
        if len(batch) >= room or manager.has(keys[end], Tier.HOST, arriving=True):
            return False  # more is there, or under way
        return spill.full

    def _block(self, known: Known, index: int, pages: tuple[int, ...]) -> Block:
        size = self._kv.page_size
        parent = known.keys[index - 1] if index else known.namespace
        tokens = pack_tokens(known.tokens[index * size : (index + 1) * size])
        return Block(known.keys[index], parent, tokens, pages)

    def finished(self, transfer: Transfer, ok: Sequence[bool], *, recalled: bool) -> None:
        """A save or a write has ended. The pages of a save are pinned no more, and those with a copy may go.
        recalled: it was taken back; somebody may have begun to count on it since."""
        if transfer.move is Move.SAVE:
            for block, good in zip(transfer.blocks, ok, strict=True):
                if good:
                    self._kv.mark(block.key, block.pages, COPIED)
                self._kv.unpin(block.pages)
        if all(ok) or (transfer.move is Move.SAVE and not recalled):
            return
        for spill in self._spills.values():
            spill.written, spill.last = 0, None
            if recalled:
                spill.saved, spill.full = 0, False
