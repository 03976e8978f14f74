"""Patterns as rules of xgrammar's EBNF.

Within a JSON string a pattern becomes an automaton's rules, of which the last writes the closing quote:
a rule that may end anywhere leaves all that may follow it to be looked up token by token, which took
milliseconds for each mask, and repetitions in repetitions are read in more ways than can be followed.
Automata of too many states, and texts that stand as they are, get one expression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools_bridge.json_schema.automaton import State, states_of
from tools_bridge.json_schema.chars import LAST, Ranges, outside
from tools_bridge.json_schema.pattern_tree import Chars, Either, Node, Repeat, Row

MOST_STATES = 256  # xgrammar looks through the vocabulary for each of them
MOST_RANGES = 2000  # beyond ASCII, in the classes of all states
FEW_RANGES = 20  # of a class that is written out anyway
ASCII = (0, 127)
ESCAPES = {34: r"\"", 92: r"\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
"""How JSON writes what may not stand in a string: behind a backslash, as it stands in a class of EBNF."""
NO_PLAIN: Ranges = ((0, 31), (34, 34), (92, 92))


def string_rules(name: str, node: Node, behind: str) -> str | None:
    """Rules of JSON strings that the pattern matches, from `name` on; None where they are too many. `behind`:
    an assertion of what follows."""
    states = states_of(node, MOST_STATES)
    if states is None:
        return None
    shared = _shared(name, states)
    lines = [_state(name, state, behind, shared) for state in states]
    begin = f'{name} ::= ("\\"" {name}_0)'
    rules = [begin, *(f"{name}_{number} ::= {line}" for number, line in enumerate(lines))]
    for (
        ranges,
        rule,
    ) in shared.items():  # in two steps: xgrammar writes out a rule of one class where it is used
        rules += [f'{rule} ::= ("" {rule}_)', f"{rule}_ ::= ({class_of(ranges)})"]
    return "\n".join(rules)


def _shared(name: str, states: Sequence[State]) -> dict[Ranges, str]:
    """Rules for what of classes is no ASCII, where there would be too much of it: compiled, a state is as
    large as its classes. Where there is not, each state has its own, for which masks are quicker."""
    found = [_beyond(ranges) for state in states for ranges, _ in state.moves]
    if sum(map(len, found)) <= MOST_RANGES:
        return {}
    wide = dict.fromkeys(ranges for ranges in found if len(ranges) > FEW_RANGES)
    return {ranges: f"{name}_of_{number}" for number, ranges in enumerate(wide)}


def _beyond(ranges: Ranges) -> Ranges:
    return outside((*outside(ranges), ASCII))


def _state(name: str, state: State, behind: str, shared: Mapping[Ranges, str]) -> str:
    ways = ['("\\"")'] if state.ends else []
    for ranges, target in state.moves:
        rule = shared.get(_beyond(ranges))
        near = ranges if rule is None else outside((*outside(ranges), (ASCII[1] + 1, LAST)))
        texts = [*(_written(near) if near else []), *([rule] if rule else [])]
        ways += [f"({text} {name}_{target})" for text in texts]
    return f"({' | '.join(ways)}){behind}"


def expression(node: Node, *, quoted: bool) -> str:
    """The right side of a rule for texts; `quoted`: within a JSON string, where what must be escaped is left
    out of classes that have anything else: a repetition of one class costs nothing, one of two does."""
    match node:
        case Chars(ranges) if quoted:
            return _written(ranges)[0]
        case Chars(ranges):
            return class_of(ranges)
        case Row(nodes):
            return " ".join(expression(part, quoted=quoted) for part in nodes) or '""'
        case Either(nodes):
            return "(" + " | ".join(f"({expression(part, quoted=quoted)})" for part in nodes) + ")"
        case Repeat(part, least, most):
            return f"({expression(part, quoted=quoted)}){{{least},{'' if most is None else most}}}"


def _written(ranges: Ranges) -> Sequence[str]:
    """In a JSON string: as they are, then behind a backslash."""
    plain = outside((*outside(ranges), *NO_PLAIN))
    escaped = "".join(text for code, text in ESCAPES.items() if any(a <= code <= b for a, b in ranges))
    return [*([class_of(plain)] if plain else []), *([rf'"\\" [{escaped}]'] if escaped else [])]


def class_of(ranges: Ranges) -> str:
    """As EBNF writes it."""
    return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"


def _char(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
