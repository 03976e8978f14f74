r"""What xgrammar 0.2.9 makes of a schema, mended: rules, as it prints them.

- Patterns: it forgets to escape `"` and `\` in some, and what stands before a repetition that ends an
  optional part (`(xxy*)?` takes `y`). It gets a character of its own for each, and the rules are ours.
- Escapes may be half of a surrogate pair.
- A name among additional properties may spell a declared one with escapes (`"\u0061"` for `"a"`).
- Strings of a bounded length may hold control characters, and bytes that are no characters.
- Numbers may have any exponent, which is infinity to most readers.
- Values that stand in a call as they are may have blanks around them, which are part of a string then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count

from tools_bridge.json_schema.chars import Ranges, outside
from tools_bridge.json_schema.pattern_tree import Chars, Either, Node, Repeat, Row
from tools_bridge.json_schema.patterns import read_pattern
from tools_bridge.schemas import GrammarError

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')  # a text, or a class of characters
_NAMED = re.compile(r'^(\S+) ::= |"\\"" (\S+) "\\""|("\\U[0-9a-f]{8}")', re.MULTILINE)
_PLACES = 0xF0000  # where characters begin that mean nothing
_ADDITIONAL = re.compile(r"^\S*_addl_key_\S+ ::= .*$", re.MULTILINE)
_ANY_ESCAPE = re.compile(r' \| \("\\\\" (?:basic_escape basic_string_sub|\S+_addl_key_exclude_\d+)\)')
_BOUNDED_CHAR, _JSON_CHAR = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n\ud800-\udfff]"
_VALUE = re.compile(
    r"whitespace_\d+\{0, \d+\} (\S*_prop_\d+) whitespace_\d+\{0, \d+\}"
    r' ("</parameter>"|"</arg_value>"|"<\|close\|>argument<\|sep\|>")'
)
_EXPONENT = re.compile(r'^(\S+ ::= \("" \| \(\[eE\] \S+ \S+_digits)\{1, -1\}(\)\))$', re.MULTILINE)
_HEX, _NO_D, _D = "[0-9A-Fa-f]", "[0-9A-CE-Fa-ce-f]", "[Dd]"
_ESCAPE = re.compile(r'^(basic_escape ::= .* \("u") (?:\[A-Fa-f0-9\] ?){4}(\)\))$', re.MULTILINE)
_ESCAPES = re.compile(
    r'^(\S+_exclude_\d+ ::= \(\(\[\\"/\\\\bfnrt\] (\S+)\) \| \("u") \S+(\)\))$', re.MULTILINE
)
_WHOLE = (
    f"({_NO_D} {_HEX} {_HEX} {_HEX} | {_D} [0-7] {_HEX} {_HEX}"
    rf' | {_D} [89ABab] {_HEX} {_HEX} "\\u" {_D} [C-Fc-f] {_HEX} {_HEX})'
)
QUOTE, BACKSLASH = 34, 92


def rules_of(source: str, printed: Callable[[str], str]) -> str:
    """The rules of a structural tag. `printed`: xgrammar's of another one."""
    tag = json.loads(source)
    known = source.lower()
    marks = (chr(code) for code in count(_PLACES) if f"{code:x}" not in known and chr(code) not in source)
    patterns = _Patterns(marks)
    return patterns.put_in(mended(printed(json.dumps(patterns.out_of(tag), ensure_ascii=False))))


def mended(rules: str) -> str:
    for mend in MENDS.values():
        rules = mend(rules)
    return rules


class _Patterns:
    """Those of schemas, taken out of a structural tag and put into its rules."""

    def __init__(self, marks: Iterator[str]) -> None:
        self._marks = marks
        self._of: dict[str, str] = {}  # pattern -> mark

    def out_of(self, form: object) -> object:
        if isinstance(form, list):
            return [self.out_of(value) for value in form]
        if not isinstance(form, dict):
            return form
        if "json_schema" in form:
            return {**form, "json_schema": self._schema(form["json_schema"])}
        return {key: self.out_of(value) for key, value in form.items()}

    def _schema(self, schema: object) -> object:
        if isinstance(schema, list):
            return [self._schema(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        found: dict[str, object] = {}
        for key, value in schema.items():
            match key, value:
                case "pattern", str():
                    found[key] = self._mark(value)
                case "patternProperties", dict():
                    found[key] = {self._mark(name): self._schema(item) for name, item in value.items()}
                case (("properties" | "$defs" | "definitions"), dict()):
                    found[key] = {name: self._schema(item) for name, item in value.items()}
                case (("enum" | "const" | "default" | "examples"), _):
                    found[key] = value
                case _:
                    found[key] = self._schema(value)
        return found

    def _mark(self, pattern: str) -> str:
        if pattern not in self._of:
            self._of[pattern] = next(self._marks)
        return self._of[pattern]

    def put_in(self, rules: str) -> str:
        nodes = {f'"\\U{ord(mark):08x}"': _read(text) for text, mark in self._of.items()}
        quoted = {found[2] for found in _NAMED.finditer(rules)}
        name = ""

        def put(found: re.Match[str]) -> str:
            nonlocal name
            name = found[1] or name
            node = nodes.get(found[3])
            return found[0] if node is None else f"({rule(node, quoted=name in quoted)})"

        rules = _NAMED.sub(put, rules)
        if any(mark[1:-1] in rules for mark in nodes):
            raise GrammarError("a pattern is not where it was expected")
        return rules


def _read(pattern: str) -> Node:
    """Ours match from end to end; clients' own structural tags may have others."""
    try:
        return read_pattern(f"^({pattern})$", "pattern", ours=True).whole
    except GrammarError:
        return read_pattern(pattern, "pattern", ours=True).whole


def _bare(found: re.Match[str]) -> str:
    """Qwen's values stand on lines of their own."""
    end = r'("" | "\n")' if found[2] == '"</parameter>"' else '""'
    return f"{end} {found[1]} {end} {found[2]}"


def rule(node: Node, *, quoted: bool = True) -> str:
    """The right side of a rule for texts; `quoted`: within a JSON string."""
    match node:
        case Chars(ranges) if quoted:
            plain = outside((*outside(ranges), (QUOTE, QUOTE), (BACKSLASH, BACKSLASH)))
            escapes = {QUOTE: r'"\\\""', BACKSLASH: r'"\\\\"'}
            parts = [_class(plain)] if plain else []
            parts += [text for code, text in escapes.items() if any(a <= code <= b for a, b in ranges)]
            return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"
        case Chars(ranges):
            return _class(ranges)
        case Row(nodes):
            return " ".join(rule(part, quoted=quoted) for part in nodes) or '""'
        case Either(nodes):
            return "(" + " | ".join(f"({rule(part, quoted=quoted)})" for part in nodes) + ")"
        case Repeat(part, least, most):
            return f"({rule(part, quoted=quoted)}){{{least},{'' if most is None else most}}}"


def _class(ranges: Ranges) -> str:
    return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges) + "]"


def _char(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


MENDS: Mapping[str, Callable[[str], str]] = {
    "names": lambda rules: _ADDITIONAL.sub(lambda line: _ANY_ESCAPE.sub("", line[0]), rules),
    "values": lambda rules: _VALUE.sub(_bare, rules),
    "exponents": lambda rules: _EXPONENT.sub(r"\1{1, 2}\2", rules),
    "characters": lambda rules: _TOKEN.sub(
        lambda found: _JSON_CHAR if found[0] == _BOUNDED_CHAR else found[0], rules
    ),
    "escapes": lambda rules: _ESCAPE.sub(lambda found: f"{found[1]} {_WHOLE}{found[2]}", rules),
    "escapes apart": lambda rules: _ESCAPES.sub(
        lambda found: f"{found[1]} {_WHOLE} {found[2]}{found[3]}", rules
    ),
}
"""They know the printout of one version; with another one they may do nothing, and nobody would notice."""
