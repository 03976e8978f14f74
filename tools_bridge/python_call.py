"""Reads `f(a=1, b="x")`, with Python's literals, as a call with JSON arguments."""

from __future__ import annotations

import ast
import json
import re

from tools_bridge.json_value import MAX_DEPTH, JsonError, check_json

MAX_CHARS = 128 * 1024  # of one argument

_TOKEN = re.compile(r"""['"()\[\]{}\\,]""")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class CallEnd:
    """Follows strings and brackets from argument to argument, and to the parenthesis that ends a call."""

    def __init__(self) -> None:
        self.done = False
        self.between = False  # what was read last is the comma behind an argument
        self.failed = False
        self._closers: list[str] = []
        self._quote = ""
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Read `text`, a call from its opening parenthesis on, from `at`; the index behind what belongs
        to it, or behind the comma of its next argument."""
        self.between = False
        while at < len(text) and not (self.done or self.failed or self.between):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _TOKEN.search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            self._take(found.group())
        return at

    def _take(self, char: str) -> None:
        if self._quote:
            self._escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "'\"":
            self._quote = char
        elif char == ",":
            self.between = len(self._closers) == 1
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            self.failed = len(self._closers) > MAX_DEPTH
        elif self._closers and self._closers[-1] == char:
            self._closers.pop()
            self.done = not self._closers
        else:
            self.failed = True


def arguments(call: str) -> str | None:
    """The arguments of a Python call as JSON text; None where they are not just named literals."""
    if len(call) > MAX_CHARS:
        return None
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        values = {}
        for keyword in tree.keywords:
            if keyword.arg is None or keyword.arg in values:
                return None
            values[keyword.arg] = ast.literal_eval(_json_names(keyword.value))
        check_json(values)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, JsonError):
        return None
    return json.dumps(values, ensure_ascii=False)


def _json_names(node: ast.expr) -> ast.expr:
    """`true`, `false` and `null` are meant as such."""
    names = {"true": True, "false": False, "null": None}
    for found in ast.walk(node):
        for field, value in ast.iter_fields(found):
            if isinstance(value, ast.Name) and value.id in names:
                setattr(found, field, ast.Constant(names[value.id]))
            elif isinstance(value, list):
                value[:] = [
                    ast.Constant(names[item.id]) if isinstance(item, ast.Name) and item.id in names else item
                    for item in value
                ]
    return ast.Constant(names[node.id]) if isinstance(node, ast.Name) and node.id in names else node
