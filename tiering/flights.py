"""Transfers in flight: what has been ordered and not been answered, and what was said of it since.

Ids are never used again, so the answer to an old order cannot be taken for a newer one's. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum, auto

import msgspec

from tiering.policy.base import Prices
from tiering.types import Block, Change, Move, Tier, Transfer, Word

MOST_BLOCKS = 32  # per transfer: an urgent one never waits for more
LANES = {
    Move.SAVE: Tier.HOST,
    Move.LOAD: Tier.HOST,
    Move.WRITE: Tier.DISK,
    Move.FETCH: Tier.DISK,
    Move.DROP: Tier.DISK,
    Move.PROBE: Tier.DISK,
    Move.BORROW: Tier.DISK,
}
MOVES = {tier: [move for move, lane in LANES.items() if lane is tier] for tier in (Tier.HOST, Tier.DISK)}


class Haste(Enum):
    """What passes what in a lane."""

    URGENT = auto()
    PLAIN = auto()
    BACK = auto()  # it was taken back


class Flights:
    """Orders and changes wait here for whoever hands them to the mover: orders first, then changes."""

    def __init__(self) -> None:
        self._flying: dict[int, Transfer] = {}
        self._recalled: set[int] = set()
        self._orders: list[Transfer] = []
        self._changes: list[Change] = []
        self._ids = 0
        self._blocks = dict.fromkeys(Move, 0)
        # How many fly, by blocks and haste: asked for every waiting turn, in every step.
        self._sizes: dict[Move, Counter[tuple[int, Haste]]] = {move: Counter() for move in Move}

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._flying.values())

    def order(self, move: Move, blocks: Sequence[Block], *, urgent: bool = False) -> list[Transfer]:
        """In transfers of bounded length; a question is one."""
        ordered: list[Transfer] = []
        most = len(blocks) if move is Move.PROBE else MOST_BLOCKS
        for start in range(0, len(blocks), most or 1):
            self._ids += 1
            transfer = Transfer(self._ids, move, tuple(blocks[start : start + most]), urgent)
            self._flying[transfer.id] = transfer
            self._count(transfer, 1)
            ordered.append(transfer)
        self._orders += ordered
        return ordered

    def hurry(self, number: int) -> None:
        """Somebody waits for it now. Nothing happens to one that has been answered, or was urgent."""
        transfer = self._flying.get(number)
        if transfer is None or transfer.urgent or number in self._recalled:
            return
        self._count(transfer, -1)
        self._flying[number] = hurried = msgspec.structs.replace(transfer, urgent=True)
        self._count(hurried, 1)
        self._changes.append(Change(number, Word.HURRY))

    def recall(self, number: int) -> None:
        """Nobody needs it any more. It stays in flight until it is answered: it may be too late."""
        if number in self._flying and number not in self._recalled:
            self._count(self._flying[number], -1)
            self._recalled.add(number)
            self._count(self._flying[number], 1)
            self._changes.append(Change(number, Word.CANCEL))

    @property
    def last(self) -> int:
        """The id of the one that was ordered last."""
        return self._ids

    @property
    def oldest(self) -> float:
        """The smallest id of those in flight: every earlier order has been answered."""
        return next(iter(self._flying), math.inf)

    @property
    def recalling(self) -> bool:
        """Is there one that was taken back, and has not been answered?"""
        return bool(self._recalled)

    def recalled(self, number: int) -> bool:
        return number in self._recalled

    def take_orders(self) -> list[Transfer]:
        orders, self._orders = self._orders, []
        return orders

    def take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def land(self, number: int) -> Transfer | None:
        """It has been answered. None if it is not known (any more)."""
        transfer = self._flying.pop(number, None)
        if transfer is not None:
            self._count(transfer, -1)
        self._recalled.discard(number)
        return transfer

    def _count(self, transfer: Transfer, change: int) -> None:
        """It flies as it is from now on (1), or no more (-1)."""
        blocks, sizes = len(transfer.blocks), self._sizes[transfer.move]
        haste = Haste.URGENT if transfer.urgent else Haste.PLAIN
        kind = (blocks, Haste.BACK if transfer.id in self._recalled else haste)
        self._blocks[transfer.move] += change * blocks
        sizes[kind] += change
        if not sizes[kind]:
            del sizes[kind]

    def blocks(self, move: Move | None = None) -> int:
        """Blocks in transfers now, of one move or of all."""
        return self._blocks[move] if move is not None else sum(self._blocks.values())

    def queue(self, prices: Prices, tier: Tier, *, urgent: bool = False) -> float:
        """Seconds until a transfer ordered now would begin, in the lane of `tier`: what is urgent passes
        what is not, but for the one that may be under way; so does everything that was taken back."""
        costs = {
            Move.SAVE: prices.save,
            Move.LOAD: prices.load,
            Move.WRITE: prices.write,
            Move.FETCH: prices.fetch,
            Move.BORROW: prices.fetch,
        }
        ahead = under_way = 0.0
        for move in MOVES[tier]:
            cost = costs.get(move)
            if cost is None:
                continue
            for (blocks, haste), count in self._sizes[move].items():
                seconds = prices.seconds(cost, blocks)
                if haste is Haste.BACK or (urgent and haste is Haste.PLAIN):
                    under_way = max(under_way, seconds)
                else:
                    ahead += count * seconds
        return ahead + under_way

    def check(self) -> None:
        """Raise AssertionError if the counts do not agree."""
        fresh = Flights()
        fresh._recalled = self._recalled
        for transfer in self:
            fresh._count(transfer, 1)
        assert (fresh._blocks, fresh._sizes) == (self._blocks, self._sizes), "counts of transfers differ"
