r"""What xgrammar 0.2.9 makes of a schema, mended: rules, as it prints them.

- Its expressions for patterns (`Regex`) forget what stands before a repetition that ends an optional part
  (`(xxy*)?` takes `y`). They become plain rules; Gemma's form has none, so that no pattern is written with
  an optional part (`pattern_tree.written`).
- A name among additional properties may spell a declared one with escapes (`"\u0061"` for `"a"`).
- Strings of a bounded length may hold control characters, and bytes that are no characters.
- Numbers may have any exponent, which is infinity to most readers.
- Values that stand in a call as they are may have blanks around them, which are part of a string then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tools_bridge.json_schema.chars import Ranges, outside
from tools_bridge.json_schema.pattern_tree import Chars, Either, Node, Repeat, Row
from tools_bridge.json_schema.patterns import read_pattern

_REGEX = re.compile(r'Regex\("((?:[^"\\]|\\.)*)", json_string=true\)')
_ESCAPED = re.compile(r"\\(.)")
_ADDITIONAL = re.compile(r"^(\S*_addl_key_\d+ ::= .*)$", re.MULTILINE)
_ANY_ESCAPE = r' | ("\\" basic_escape basic_string_sub)'
_BOUNDED_CHAR, _JSON_CHAR = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n\ud800-\udfff]"
_VALUE = re.compile(
    r"whitespace_\d+\{0, \d+\} (\S*_prop_\d+) whitespace_\d+\{0, \d+\}"
    r' ("</parameter>"|"</arg_value>"|"<\|close\|>argument<\|sep\|>")'
)
_EXPONENT = re.compile(r"(\[eE\] basic_number_\d+ basic_number_digits)\{1, -1\}")
QUOTE, BACKSLASH = 34, 92


def mended(rules: str) -> str:
    for mend in MENDS.values():
        rules = mend(rules)
    return rules


def _bare(found: re.Match[str]) -> str:
    """Qwen's values stand on lines of their own."""
    end = r'("" | "\n")' if found[2] == '"</parameter>"' else '""'
    return f"{end} {found[1]} {end} {found[2]}"


def _plain(found: re.Match[str]) -> str:
    source = _ESCAPED.sub(r"\1", found[1])
    return f"({rule(read_pattern(f'^({source})$', 'pattern', ours=True).whole)})"


def rule(node: Node) -> str:
    """The right side of a rule for texts within a JSON string."""
    match node:
        case Chars(ranges):
            plain = outside((*outside(ranges), (QUOTE, QUOTE), (BACKSLASH, BACKSLASH)))
            escapes = {QUOTE: r'"\\\""', BACKSLASH: r'"\\\\"'}
            parts = [_class(plain)] if plain else []
            parts += [text for code, text in escapes.items() if any(a <= code <= b for a, b in ranges)]
            return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"
        case Row(nodes):
            return " ".join(map(rule, nodes)) or '""'
        case Either(nodes):
            return "(" + " | ".join(f"({rule(part)})" for part in nodes) + ")"
        case Repeat(part, least, most):
            return f"({rule(part)}){{{least},{'' if most is None else most}}}"


def _class(ranges: Ranges) -> str:
    return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"


def _char(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


MENDS: Mapping[str, Callable[[str], str]] = {
    "patterns": lambda rules: _REGEX.sub(_plain, rules),
    "names": lambda rules: _ADDITIONAL.sub(lambda line: line[1].replace(_ANY_ESCAPE, ""), rules),
    "values": lambda rules: _VALUE.sub(_bare, rules),
    "exponents": lambda rules: _EXPONENT.sub(r"\1{1, 2}", rules),
    "characters": lambda rules: rules.replace(_BOUNDED_CHAR, _JSON_CHAR),
}
"""They know the printout of one version; with another one they may do nothing, and nobody would notice."""
