"""Patterns with a length: fewer texts than both allow, all of them within it.

A length cuts through the repetitions of a pattern in ways that no expression of reasonable size can say;
each of them gets a share of it.
"""

from __future__ import annotations

from tools_bridge.json_schema.pattern_tree import Chars, Either, Node, Repeat, Row
from tools_bridge.json_schema.patterns import Pattern

MOST_HELD = 512  # characters of such a text: larger counts take long to compile
FEW = 4  # turns that share alike
ONCE = 16  # characters for a turn of a repetition whose turns differ in length


def narrower(pattern: Pattern, least: int, most: int | None) -> Pattern | None:
    """None where that cannot be said."""
    node = pattern.whole
    if most is not None:
        low, _ = pattern.lengths
        node = _shorter(node, max(low, min(most, MOST_HELD)))
    longer = _longer(node, least)
    return None if longer is None else Pattern(pattern.text, longer)


def _lengths(node: Node) -> tuple[int, int | None]:
    return Pattern("", node).lengths


def _shorter(node: Node, most: int) -> Node:
    """No text of it is longer; its shortest one is not."""
    _, high = _lengths(node)
    if high is not None and high <= most:
        return node
    match node:
        case Chars():
            return node
        case Either(nodes):
            return Either(tuple(_shorter(part, most) for part in nodes if _lengths(part)[0] <= most))
        case Row(nodes):
            return Row(tuple(_shared(list(nodes), most)))
        case Repeat(part, least, limit):
            low, high = _lengths(part)
            turns = least or (limit if limit is not None and limit <= FEW else 0)
            once = max(low, most // turns) if turns else max(low, min(most, ONCE))
            if high is not None and high <= once:
                once = high
            count = max(least, most // max(once, 1))
            turn = _shorter(part, once)
            if count == 0 or _lengths(turn) == (0, 0):
                return Row(())
            return Repeat(turn, least, count if limit is None else min(limit, count))


def _shared(nodes: list[Node], most: int) -> list[Node]:
    """What is left beside the shortest texts goes to those that vary, the ones that need least first."""
    spare = most - sum(_lengths(part)[0] for part in nodes)
    varying = [index for index, part in enumerate(nodes) if _lengths(part)[0] != _lengths(part)[1]]
    needs = {index: _lengths(nodes[index]) for index in varying}
    varying.sort(key=lambda index: needs[index][1] or 10**9 if needs[index][1] is not None else 10**9)
    for place, index in enumerate(varying):
        low, high = needs[index]
        share = spare // (len(varying) - place)
        nodes[index] = _shorter(nodes[index], low + share)
        used = _lengths(nodes[index])[1]
        assert used is not None
        spare -= used - low
        assert high is None or used <= high
    return nodes


def _longer(node: Node, least: int) -> Node | None:
    """One repetition takes up what is missing; the others may add to it."""
    low, _ = _lengths(node)
    if low >= least:
        return node
    if isinstance(node, Either):
        found = [longer for part in node.nodes if (longer := _longer(part, least)) is not None]
        return Either(tuple(found)) if found else None
    nodes: list[Node] = list(node.nodes) if isinstance(node, Row) else [node]
    for index, part in enumerate(nodes):
        missing = least - low
        if isinstance(part, Repeat) and (once := _lengths(part.node)[0]):
            turns = part.least + -(-missing // once)
            if part.most is None or part.most >= turns:
                nodes[index] = Repeat(part.node, turns, part.most)
                return Row(tuple(nodes))
        elif isinstance(part, Row | Either):
            inner = _longer(part, _lengths(part)[0] + missing)
            if inner is not None:
                nodes[index] = inner
                return Row(tuple(nodes))
    return None
