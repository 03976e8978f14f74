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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count

from tools_bridge.json_schema.pattern_rules import expression, string_rules
from tools_bridge.json_schema.pattern_tree import ANY, Node, Repeat
from tools_bridge.json_schema.patterns import Pattern, read_pattern
from tools_bridge.repetitions import check_depth
from tools_bridge.schemas import GrammarError

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')  # a text, or a class of characters
_NAMED = re.compile(r'^(\S+) ::= |("\\U[0-9a-f]{8}")', re.MULTILINE)
_MARKED = re.compile(r'^(\S+) ::= \(\(("\\U[0-9a-f]{8}")\)\)$', re.MULTILINE)
_WORD = re.compile(r"\w+")
_QUOTED = re.compile(r'"\\"" (\S+) "\\""')
_BEHIND = re.compile(r"^basic_string_sub ::= .*( \(=\(.*\)\))$", re.MULTILINE)
MOST_LEAST = 16  # characters of a length that is held by a pattern
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
        self._open_lengths = False

    def out_of(self, form: object) -> object:
        if isinstance(form, list):
            return [self.out_of(value) for value in form]
        if not isinstance(form, dict):
            return form
        if "json_schema" in form:
            self._open_lengths = form.get("style", "json") == "json"
            return {**form, "json_schema": self._schema(form["json_schema"])}
        return {key: self.out_of(value) for key, value in form.items()}

    def _schema(self, schema: object) -> object:
        if isinstance(schema, list):
            return [self._schema(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if self._open_lengths:
            schema = _open_length(schema)
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
        """A pattern that is all of a string has rules of its own; elsewhere it is written out."""
        nodes = {f'"\\U{ord(mark):08x}"': _read(text) for text, mark in self._of.items()}
        behind = _BEHIND.search(rules)
        prefix = "pattern"
        while f"{prefix}_" in rules:
            prefix += "_"
        names: dict[str, str] = {}  # a mark -> the rule that replaces it and its quotes
        more: list[str] = []
        for index, (mark, node) in enumerate(nodes.items()):
            made = string_rules(f"{prefix}_{index}", node, behind[1] if behind else "")
            if made is not None:
                names[mark] = f"{prefix}_{index}"
                more.append(made)
        marked = {found[1]: found[2] for found in _MARKED.finditer(rules)}
        rules = _QUOTED.sub(lambda found: names.get(marked.get(found[1], ""), found[0]), rules)
        used = Counter(_WORD.findall(rules))
        rules = _MARKED.sub(
            lambda found: "" if names.get(found[2]) and used[found[1]] == 1 else found[0], rules
        )
        quoted = {found[1] for found in _QUOTED.finditer(rules)}
        name = ""

        def put(found: re.Match[str]) -> str:
            nonlocal name
            name = found[1] or name
            node = nodes.get(found[2])
            if node is not None:
                check_depth(node)  # there is no automaton of it here
            return found[0] if node is None else f"({expression(node, quoted=name in quoted)})"

        rules = _NAMED.sub(put, rules)
        if any(mark[1:-1] in rules for mark in nodes):
            raise GrammarError("a pattern is not where it was expected")
        return "\n".join([rules.rstrip("\n"), *more, ""])


def _open_length(schema: dict[str, object]) -> dict[str, object]:
    """A length at the least as a pattern: xgrammar has no escapes in strings whose length it counts."""
    least = schema.get("minLength")
    counted = isinstance(least, int) and 0 < least <= MOST_LEAST
    if schema.get("type") != "string" or not counted or schema.keys() & {"maxLength", "pattern", "format"}:
        return schema
    assert isinstance(least, int)
    rest = {key: value for key, value in schema.items() if key != "minLength"}
    return rest | {"pattern": Pattern("", Repeat(ANY, least, None)).source("")}


def _read(pattern: str) -> Node:
    """They match from end to end."""
    return read_pattern(f"^({pattern})$", "pattern", ours=True).whole


def _bare(found: re.Match[str]) -> str:
    """Qwen's values stand on lines of their own."""
    end = r'("" | "\n")' if found[2] == '"</parameter>"' else '""'
    return f"{end} {found[1]} {end} {found[2]}"


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
