"""What scripts say when nothing dies, to compare with what they say when something does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Unsuitable(Exception):
    """The model does not play along with a script: it calls unasked, or a call or the context is too long."""


@dataclass(frozen=True)
class Sizes:
    """How much agents say."""

    words: int = 60  # of a first message, at most
    rounds: int = 2
    call_tokens: int = 160
    text_tokens: int = 14
    temperature: float = 0.8
    choice: Any = "required"


@dataclass
class Book:
    """What every turn of every script says: written undisturbed, then compared with."""

    said: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    closed: bool = False
    turns: int = 0  # compared
    ids: int = 0

    def begins(self, turn: tuple[int, str], ids: list[int]) -> None:
        """A reply that broke off."""
        if self.closed:
            assert self.said[turn][: len(ids)] == tuple(ids), f"{turn} began as {ids}, not {self.said[turn]}"

    def says(self, turn: tuple[int, str], ids: list[int]) -> None:
        if not self.closed:
            assert self.said.setdefault(turn, tuple(ids)) == tuple(ids), f"{turn} says this and that"
            return
        assert self.said[turn] == tuple(ids), f"{turn} said {ids}, not {self.said[turn]}"
        self.turns += 1
        self.ids += len(ids)
