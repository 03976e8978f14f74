"""Patterns as automata that are in one state at a time (Rabin and Scott 1959), the smallest there are.

A grammar made of one reads each text in one way, however its pattern is written, and goes on from one rule
to the next until the text ends: what xgrammar masks tokens for quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools_bridge.json_schema.chars import LAST, Ranges, outside
from tools_bridge.json_schema.pattern_tree import Chars, Either, Node, Repeat, Row, size

MOST_PLACES = 4000  # characters of a pattern, each as often as it is counted
MOST_WORK = 400_000  # places that are looked at to find the states


@dataclass(frozen=True, slots=True)
class State:
    """`moves`: the characters that lead to another state, by its number."""

    ends: bool
    moves: tuple[tuple[Ranges, int], ...]


def states_of(node: Node, most: int) -> list[State] | None:
    """The first is where texts begin; None where there would be more than `most`."""
    if size(node) > MOST_PLACES:
        return None
    places = _Places(node)
    kinds = _kinds(ranges for ranges, _ in places.moves.values())
    found = _determined(places, kinds, 4 * most)
    return None if found is None else _smallest(*found, kinds, most)


class _Places:
    """Thompson's (1968): each place has one move by a character, or some that take none."""

    def __init__(self, node: Node) -> None:
        self.free: list[tuple[int, ...]] = []
        self.moves: dict[int, tuple[Ranges, int]] = {}
        self.end = self._place()
        self.start = self._add(node, self.end)

    def _place(self, *free: int) -> int:
        self.free.append(free)
        return len(self.free) - 1

    def _add(self, node: Node, then: int) -> int:
        """Where the node begins that goes on with `then`."""
        match node:
            case Chars(ranges):
                place = self._place()
                self.moves[place] = ranges, then
                return place
            case Row(nodes):
                for part in reversed(nodes):
                    then = self._add(part, then)
                return then
            case Either(nodes):
                return self._place(*[self._add(part, then) for part in nodes])
            case Repeat(part, least, most):
                return self._repeat(part, least, most, then)

    def _repeat(self, part: Node, least: int, most: int | None, then: int) -> int:
        if most is None:
            again = self._place()
            begin = self._add(part, again)
            self.free[again] = (begin, then)
            then = again
            if least:  # one of them is what may come again: nested, each would be there twice as often
                then, least = begin, least - 1
        else:
            out = then
            for _ in range(most - least):
                then = self._place(self._add(part, then), out)
        for _ in range(least):
            then = self._add(part, then)
        return then

    def reached(self, places: Iterable[int]) -> frozenset[int]:
        """Without a character; those alone that it matters to be in."""
        seen = set(places)
        waiting = list(seen)
        while waiting:
            for place in self.free[waiting.pop()]:
                if place not in seen:
                    seen.add(place)
                    waiting.append(place)
        return frozenset(place for place in seen if place in self.moves or place == self.end)


def _kinds(classes: Iterable[Ranges]) -> list[tuple[int, int]]:
    """Ranges of characters that no class tells apart."""
    cuts = sorted({0, *(cut for ranges in classes for low, high in ranges for cut in (low, high + 1))})
    return [(low, high - 1) for low, high in zip(cuts, [*cuts[1:], LAST + 1], strict=True) if low <= LAST]


def _determined(
    places: _Places, kinds: Sequence[tuple[int, int]], most: int
) -> tuple[list[bool], list[dict[int, int]]] | None:
    """(which states end a text, where each kind of character leads from each of them)."""
    of_class: dict[Ranges, list[int]] = {}
    for ranges, _ in places.moves.values():
        if ranges not in of_class:
            of_class[ranges] = [
                n for n, (low, _) in enumerate(kinds) if any(a <= low <= b for a, b in ranges)
            ]
    numbers = {places.reached([places.start]): 0}
    waiting = list(numbers)
    ends: list[bool] = []
    moves: list[dict[int, int]] = []
    work = 0
    for state in waiting:  # it grows
        by_kind: dict[int, set[int]] = {}
        for place in state & places.moves.keys():
            ranges, then = places.moves[place]
            work += len(of_class[ranges])
            for kind in of_class[ranges]:
                by_kind.setdefault(kind, set()).add(then)
        ends.append(places.end in state)
        targets: dict[frozenset[int], int] = {}
        found: dict[int, int] = {}
        for kind, reached in by_kind.items():
            key = frozenset(reached)
            if key not in targets:
                closed = places.reached(key)
                work += len(closed)
                if closed not in numbers:
                    numbers[closed] = len(numbers)
                    waiting.append(closed)
                targets[key] = numbers[closed]
            found[kind] = targets[key]
        moves.append(found)
        if len(numbers) > most or work > MOST_WORK:
            return None
    return ends, moves


def _smallest(
    ends: list[bool], moves: list[dict[int, int]], kinds: Sequence[tuple[int, int]], most: int
) -> list[State] | None:
    """States that no text tells apart are one (Moore 1956)."""
    columns = {tuple(found.get(kind, -1) for found in moves): kind for kind in range(len(kinds))}
    alike = sorted(columns.values())
    block = [int(end) for end in ends]
    count = len(set(block))
    while True:
        signs: dict[tuple[int, ...], int] = {}
        block = [
            signs.setdefault(
                (block[state], *(block[found[kind]] if kind in found else -1 for kind in alike)), len(signs)
            )
            for state, found in enumerate(moves)
        ]
        if len(signs) == count:
            break
        count = len(signs)
    if count > most:
        return None
    one_of = {number: state for state, number in reversed(list(enumerate(block)))}
    return [_state(ends[state], moves[state], kinds, block) for _, state in sorted(one_of.items())]


def _state(end: bool, moves: dict[int, int], kinds: Sequence[tuple[int, int]], block: list[int]) -> State:
    by_target: dict[int, list[tuple[int, int]]] = {}
    for kind, target in sorted(moves.items()):
        by_target.setdefault(block[target], []).append(kinds[kind])
    return State(
        end, tuple((outside(outside(ranges)), target) for target, ranges in sorted(by_target.items()))
    )
