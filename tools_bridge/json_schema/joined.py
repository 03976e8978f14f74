"""Several patterns for one text, as one: those that say how it begins, what is in it and how it ends.

What they say together is held in that order, without overlaps: less may be let through than all of them
allow, never more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools_bridge.json_schema.chars import CONTROLS, Ranges, outside
from tools_bridge.json_schema.pattern_tree import Chars, Node, Repeat, Row
from tools_bridge.json_schema.patterns import Pattern


@dataclass(frozen=True, slots=True)
class _Open:
    """`start`, any characters of `wide`, `middle` and again, `end`."""

    start: tuple[Node, ...]
    middle: tuple[Node, ...]
    end: tuple[Node, ...]
    wide: Ranges
    least: int  # characters in all
    most: int | None


def joined(patterns: Sequence[Pattern], *, bounded: bool = False) -> Pattern | None:
    """What all of them allow, or a part of it; None where that cannot be said. `bounded`: a length will be
    held, too, for which there may be one repetition."""
    unlike = list({pattern.whole: pattern for pattern in patterns}.values())
    if len(unlike) == 1:
        return unlike[0]
    read = [_read(pattern.whole) for pattern in unlike]
    opened = [found for found in read if found is not None]
    starts, ends = [found.start for found in opened if found.start], [f.end for f in opened if f.end]
    if len(opened) < len(read) or len(starts) > 1 or len(ends) > 1:
        return None
    wide = _shared([found.wide for found in opened])
    middles = [found.middle for found in opened if found.middle]
    start, end = starts[0] if starts else (), ends[0] if ends else ()
    said = [*start, *end, *(node for middle in middles for node in middle)]
    if not wide or not all(_within(node, wide) for node in said):
        return None
    fixed = sum(_length(node) or 0 for node in said)
    mosts = [found.most for found in opened if found.most is not None]
    least = max(found.least for found in opened)
    any_more = Repeat(Chars(wide), 0, None)
    if mosts or least > fixed or bounded:
        high = min(mosts) - fixed if mosts else None
        low = max(0, least - fixed)
        if any(_length(node) is None for node in said) or (high is not None and high < low):
            return None
        nodes = [
            *start,
            *(node for middle in middles for node in middle),
            Repeat(Chars(wide), low, high),
            *end,
        ]
    else:
        nodes = [*start, any_more]
        for middle in middles:
            nodes += [*middle, any_more]
        nodes += end
    return Pattern(" and ".join(pattern.text for pattern in unlike), Row(tuple(nodes)))


def _read(node: Node) -> _Open | None:
    nodes = _flat(node)
    loose = [index for index, part in enumerate(nodes) if isinstance(part, Repeat) and _is_wide(part)]
    if not loose or len(loose) > 2:
        return None
    first, last = loose[0], loose[-1]
    wides = [nodes[index] for index in loose]
    wide = _shared(
        [part.node.ranges for part in wides if isinstance(part, Repeat) and isinstance(part.node, Chars)]
    )
    counts = [(part.least, part.most) for part in wides if isinstance(part, Repeat)]
    start, middle, end = nodes[:first], nodes[first + 1 : last], nodes[last + 1 :]
    lengths = [_length(part) for part in (*start, *middle, *end)]
    plain = counts in ([(0, None)], [(0, None), (0, None)])
    if not plain and (len(loose) > 1 or None in lengths):
        return None
    fixed = sum(length or 0 for length in lengths)
    least, most = counts[0] if not plain else (0, None)
    return _Open(start, middle, end, wide, fixed + least, None if most is None else fixed + most)


def _flat(node: Node) -> tuple[Node, ...]:
    """What stands in a row; `.*` beside any text is any text."""
    if not isinstance(node, Row):
        return (node,)
    found: list[Node] = []
    for part in [inner for each in node.nodes for inner in _flat(each)]:
        before, after = _any_number(found[-1]) if found else None, _any_number(part)
        shared = _shared([before, after]) if before and after else ()
        if before and shared in (before, after):
            found[-1] = Repeat(Chars(before if shared == after else after or ()), 0, None)
        else:
            found.append(part)
    return tuple(found)


def _any_number(node: Node) -> Ranges | None:
    """Of which characters it is any number; controls, which no text has, apart."""
    if isinstance(node, Repeat) and isinstance(node.node, Chars) and (node.least, node.most) == (0, None):
        return outside((*CONTROLS, *outside(node.node.ranges)))
    return None


def _is_wide(part: Repeat) -> bool:
    return isinstance(part.node, Chars) and part.least != part.most


def _shared(ranges: Sequence[Ranges]) -> Ranges:
    found: Ranges = ranges[0]
    for other in ranges[1:]:
        found = outside((*outside(found), *outside(other)))
    return found


def _within(node: Node, wide: Ranges) -> bool:
    """Whether all its texts are made of these characters."""
    match node:
        case Chars(ranges):
            return _shared([ranges, wide]) == outside(outside(ranges))
        case Repeat(part):
            return _within(part, wide)
    return all(_within(part, wide) for part in node.nodes)


def _length(node: Node) -> int | None:
    low, high = Pattern("", node).lengths
    return low if low == high else None
