"""Regular expressions whose repetitions overlap: one text is read in ways that multiply with its length.

A repetition overlaps itself where what it repeats may be empty, or a character that goes on with it may also
begin it anew (`(a+b?)+`): so do not repetitions that are one-unambiguous (Brueggemann-Klein and Wood 1998).
xgrammar follows all the ways at once, and each overlapping repetition within another one multiplies them.
An automaton has one way; where it would be too large, repetitions that overlap may not be nested.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tools_bridge.json_schema.automaton import State, states_of
from tools_bridge.json_schema.chars import Ranges, outside
from tools_bridge.json_schema.pattern_rules import class_of
from tools_bridge.json_schema.pattern_tree import Chars, Either, Node, Repeat, Row
from tools_bridge.json_schema.patterns import read_whole
from tools_bridge.schemas import GrammarError

MOST_DEPTH = 1  # of overlapping repetitions in one another, where there is no automaton
MOST_STATES = 1000

AMBIGUOUS = (
    "the grammar is too ambiguous: it reads one text in so many ways that each further character takes "
    "longer; write repetitions so that one does not stand directly in another"
)


class Ambiguous(GrammarError):
    """A grammar that cannot be followed, by its shape."""


@dataclass(frozen=True, slots=True)
class _Facts:
    empty: bool  # it matches the empty text
    first: Ranges  # what texts begin with
    more: Ranges  # what a text that is whole may go on with
    depth: int  # of overlapping repetitions


def depth(node: Node) -> int:
    """How many repetitions that overlap themselves stand in one another."""
    return _facts(node).depth


def check_depth(node: Node) -> None:
    """Ambiguous where it cannot be followed."""
    if depth(node) > MOST_DEPTH:
        raise Ambiguous(AMBIGUOUS)


def unambiguous(source: str) -> str:
    """A structural tag with rules in the place of regular expressions that have many ways to read a text.
    Ambiguous where one cannot be followed."""
    if '"regex"' not in source:
        return source
    tag = json.loads(source)
    rest: list[object] = [tag]
    while rest:
        node = rest.pop()
        if isinstance(node, list):
            rest.extend(node)
        if not isinstance(node, dict):
            continue
        pattern = node.get("pattern")
        if node.get("type") == "regex" and isinstance(pattern, str):
            rules = rules_of_regex(pattern)
            if rules is not None:
                node.clear()
                node.update({"type": "grammar", "grammar": rules})
        rest.extend(value for key, value in node.items() if key != "json_schema")
    return json.dumps(tag, ensure_ascii=False)


def rules_of_regex(text: str) -> str | None:
    """An expression that overlaps, as rules from `root` on that read each text in one way. None where it
    may stand as it is, or is none that is read here. Ambiguous where it cannot be followed."""
    try:
        node = read_whole(text, "regex")
    except GrammarError:
        return None
    if not depth(node):
        return None
    states = states_of(node, MOST_STATES)
    if states is None:
        check_depth(node)
        return None
    return "\n".join(
        ["root ::= s0", *(f"s{number} ::= {_rule(state)}" for number, state in enumerate(states))]
    )


def _rule(state: State) -> str:
    ways = [f"{class_of(ranges)} s{target}" for ranges, target in state.moves]
    return " | ".join(['""', *ways] if state.ends else ways)


def _facts(node: Node) -> _Facts:
    match node:
        case Chars(ranges):
            return _Facts(False, ranges, (), 0)
        case Row(nodes):
            return _row([_facts(part) for part in nodes])
        case Either(nodes):
            parts = [_facts(part) for part in nodes]
            return _Facts(
                any(part.empty for part in parts),
                _union(*(part.first for part in parts)),
                _union(*(part.more for part in parts)),
                max(part.depth for part in parts),
            )
        case Repeat(part, least, most):
            inner = _facts(part)
            again = most is None or most > 1
            overlaps = again and (inner.empty or _meet(inner.first, inner.more))
            more = _union(inner.more, inner.first) if again else inner.more
            return _Facts(least == 0 or inner.empty, inner.first, more, inner.depth + overlaps)


def _row(parts: list[_Facts]) -> _Facts:
    first: Ranges = ()
    for part in parts:
        first = _union(first, part.first)
        if not part.empty:
            break
    more: Ranges = ()
    for part in reversed(parts):
        more = _union(more, part.more)
        if not part.empty:
            break
        more = _union(more, part.first)
    return _Facts(
        all(part.empty for part in parts), first, more, max((part.depth for part in parts), default=0)
    )


def _union(*sets: Ranges) -> Ranges:
    return outside(outside([pair for ranges in sets for pair in ranges]))


def _meet(one: Ranges, other: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in one for c, d in other)
