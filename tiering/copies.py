"""The copies of blocks in one tier: which, where, read by whom, and which of them go first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tiering.types import Tier

Standing = tuple[float, float]  # (worth in seconds, when it was last of use): the smaller goes first
MOST_ELSEWHERE = 1 << 16  # blocks of others that are remembered
FIRST: Standing = (float("inf"), float("inf"))
WORTHLESS: Standing = (0.0, float("inf"))  # above what is worth nothing


Losers = Callable[[Standing], Iterator[bytes]]


class Ranking(Protocol):
    """Who has blocks, and what they are worth."""

    def owned(self, key: bytes) -> bool: ...

    def losers(self, tier: Tier) -> Losers:
        """Rank those who own blocks, as they stand now; then, of any standing: keys of owned blocks that
        stand below it, in the order in which they may go."""
        ...


class Nobody:
    """The ranking without sessions: no block is anybody's."""

    def owned(self, key: bytes) -> bool:
        return False

    def losers(self, tier: Tier) -> Losers:
        return lambda _: iter(())


@dataclass(slots=True)
class Copy:
    """A block in a tier. `slot` is of the host, `nbytes` of the disk."""

    slot: int = -1
    nbytes: int = 0
    ready: bool = False
    pins: int = 0  # transfers that read it; the one that brings it counts too


class Copies(OrderedDict[bytes, Copy]):
    """By key; what nobody owns first, then what was owned or used longest ago."""

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self.tier = tier

    def has(self, key: bytes, *, arriving: bool = False) -> bool:
        """Is the block here, or, with `arriving`, on its way?"""
        copy = self.get(key)
        return copy is not None and (copy.ready or arriving)

    def touch(self, key: bytes) -> None:
        """The block is somebody's, or was of use."""
        if key in self:
            self.move_to_end(key)

    def neglect(self, key: bytes) -> None:
        """The block is nobody's any more: it goes first."""
        if key in self:
            self.move_to_end(key, last=False)

    def victims(self, ranking: Ranking, below: Standing, beneath: Copies | None = None) -> Iterator[bytes]:
        """Keys that may go, in order: nobody's, those of no worth, those that are `beneath` as well, whoever
        wants them, then those that stand below `below`. Pinned ones stay."""
        for key, nobodys in self.items():
            if ranking.owned(key):
                break
            if not nobodys.pins:
                yield key
        rounds: list[tuple[Standing, Copies | None]] = [(below, None)]
        if beneath:
            rounds = [(min(WORTHLESS, below), None), (FIRST, beneath), *rounds]
        gone: set[bytes] = set()
        losers = ranking.losers(self.tier)  # takes time for every session: once
        for limit, among in rounds:
            for key in losers(limit):
                copy = self.get(key)
                if copy is None or copy.pins or key in gone or (among is not None and not among.has(key)):
                    continue
                gone.add(key)
                yield key


class Elsewhere(OrderedDict[bytes, None]):
    """Blocks that this machine's other workers had on disk when they were last asked; not to be relied on."""

    def said(self, key: bytes, there: bool) -> None:
        """What asking, or reading, has told."""
        self.pop(key, None)
        if there:
            self[key] = None
            if len(self) > MOST_ELSEWHERE:
                self.popitem(last=False)
