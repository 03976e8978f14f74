"""Transfers in flight: what has been ordered and not been answered, and what was said of it since.

Ids are never used again, so the answer to an old order cannot be taken for a newer one's. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


class Flights:
    """Orders and changes wait here for whoever hands them to the mover: orders first, then changes."""

    def __init__(self) -> None:
        self._flying: dict[int, Transfer] = {}
        self._recalled: set[int] = set()
        self._orders: list[Transfer] = []
        self._changes: list[Change] = []
        self._ids = 0

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
            ordered.append(transfer)
        self._orders += ordered
        return ordered

    def hurry(self, number: int) -> None:
        """Somebody waits for it now. Nothing happens to one that has been answered, or was urgent."""
        transfer = self._flying.get(number)
        if transfer is None or transfer.urgent or number in self._recalled:
            return
        self._flying[number] = msgspec.structs.replace(transfer, urgent=True)
        self._changes.append(Change(number, Word.HURRY))

    def recall(self, number: int) -> None:
        """Nobody needs it any more. It stays in flight until it is answered: it may be too late."""
        if number in self._flying and number not in self._recalled:
            self._recalled.add(number)
            self._changes.append(Change(number, Word.CANCEL))

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
        self._recalled.discard(number)
        return self._flying.pop(number, None)

    def blocks(self, move: Move | None = None) -> int:
        """Blocks in transfers now, of one move or of all."""
        return sum(len(transfer.blocks) for transfer in self if move in (None, transfer.move))

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
        for transfer in self:
            cost = costs.get(transfer.move)
            if cost is None or LANES[transfer.move] is not tier:
                continue
            seconds = prices.seconds(cost, len(transfer.blocks))
            if (urgent and not transfer.urgent) or transfer.id in self._recalled:
                under_way = max(under_way, seconds)
            else:
                ahead += seconds
        return ahead + under_way
