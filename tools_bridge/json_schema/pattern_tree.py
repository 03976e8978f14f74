"""Regular expressions as trees: what they match, how long that is, and how xgrammar wants them written."""

from __future__ import annotations

from dataclasses import dataclass

from tools_bridge.json_schema.chars import SIZES, Ranges, outside
from tools_bridge.schemas import GrammarError

MOST_WORK = 500_000  # places in a text that are looked at, to match it once


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Repeat:
    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Row:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    nodes: tuple[Node, ...]


Node = Chars | Repeat | Row | Either
ANY = Chars(outside(()))
ANYTHING = Repeat(ANY, 0, None)
"""Any text."""


class Work:
    """A bound on what may be done to match, once or several times: patterns can be made to be slow."""

    def __init__(self, times: int = 1) -> None:
        self._left = MOST_WORK * times

    def do(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise GrammarError("a pattern takes too long to match")


def ends(node: Node, text: str, starts: frozenset[int], work: Work) -> frozenset[int]:
    """Where matches that begin at one of `starts` may end."""
    if not starts:
        return starts
    work.do(len(starts))
    match node:
        case Chars(ranges):
            return frozenset(
                at + 1 for at in starts if at < len(text) and any(a <= ord(text[at]) <= b for a, b in ranges)
            )
        case Row(nodes):
            for part in nodes:
                starts = ends(part, text, starts, work)
            return starts
        case Either(nodes):
            return frozenset().union(*(ends(part, text, starts, work) for part in nodes))
        case Repeat(part, least, most):
            for _ in range(least):
                before, starts = starts, ends(part, text, starts, work)
                if starts in (before, frozenset()):
                    break  # and so on for ever
            found, last, count = set(starts), starts, least
            while last and (most is None or count < most):
                last = ends(part, text, last, work) - found
                found |= last
                count += 1
            return frozenset(found)


def size(node: Node) -> int:
    match node:
        case Chars():
            return 1
        case Row(nodes) | Either(nodes):
            return sum(map(size, nodes))
        case Repeat(part, least, most):
            return size(part) * max(1, least if most is None else most)


def lengths(node: Node) -> tuple[int, int | None]:
    match node:
        case Chars():
            return 1, 1
        case Row(nodes):
            each = [lengths(part) for part in nodes]
            ends = [high for _, high in each]
            return sum(low for low, _ in each), None if None in ends else sum(high or 0 for high in ends)
        case Either(nodes):
            each = [lengths(part) for part in nodes]
            ends = [high for _, high in each]
            return min(low for low, _ in each), None if None in ends else max(high or 0 for high in ends)
        case Repeat(part, least, most):
            low, high = lengths(part)
            if high == 0:
                return 0, 0
            return low * least, None if most is None or high is None else high * most


def counted(node: Node, least: int, most: int | None) -> Node | None:
    """One repetition among parts of fixed length takes up what is left."""
    parts = list(node.nodes) if isinstance(node, Row) else [node]
    found = [lengths(part) for part in parts]
    loose = [index for index, (low, high) in enumerate(found) if low != high]
    if len(loose) != 1:
        return None
    part = parts[loose[0]]
    if not isinstance(part, Repeat) or lengths(part.node) != (1, 1):
        return None
    fixed = sum(low for index, (low, _) in enumerate(found) if index != loose[0])
    low = max(part.least, least - fixed)
    high = part.most if most is None else most - fixed if part.most is None else min(part.most, most - fixed)
    if high is not None and high < low:
        return None
    parts[loose[0]] = Repeat(part.node, low, high)
    return Row(tuple(parts))


def written(node: Node, allowed: Ranges) -> str:
    """With these characters only; a ValueError where another one is needed."""
    match node:
        case Chars(ranges):
            left = outside((*outside(ranges), *outside(allowed)))
            marks, left = _peeled(left)
            classes = [_class(found) for low, high in SIZES if (found := _within(left, low, high))]
            choices = [*classes, *map(_char, marks)]
            if not choices:
                raise ValueError
            return choices[0] if len(choices) == 1 else f"({'|'.join(choices)})"
        case Row(nodes):
            return "".join(written(part, allowed) for part in nodes)
        case Either(nodes):
            return "(" + "|".join(written(part, allowed) for part in nodes) + ")"
        case Repeat(part, least, most):
            inner = written(part, allowed)
            if (least, most) == (0, 1) and not isinstance(part, Chars):
                return f"(|{inner})"  # xgrammar 0.2.9 lets `(xxy*)?` begin within its last repetition
            signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
            sign = signs.get((least, most), f"{{{least},{'' if most is None else most}}}")
            return (inner if isinstance(part, Chars) else f"({inner})") + sign


def _within(ranges: Ranges, low: int, high: int) -> Ranges:
    return tuple((max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low)


def _peeled(ranges: Ranges) -> tuple[list[int], Ranges]:
    """Signs that mean something in a class, where they begin or end a range, apart from the rest: xgrammar
    forgets to escape them."""
    signs = set(map(ord, "-]^[\\"))
    found: list[int] = []
    rest: list[tuple[int, int]] = []
    for low, high in ranges:
        while low in signs and low <= high:
            found.append(low)
            low += 1
        while high in signs and low <= high:
            found.append(high)
            high -= 1
        if low <= high:
            rest.append((low, high))
    return found, tuple(rest)


def _class(ranges: Ranges) -> str:
    return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"


def _char(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{{{code:x}}}"  # xgrammar takes any number of digits behind \x
