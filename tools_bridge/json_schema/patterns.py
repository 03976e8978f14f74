"""Regular expressions of JSON Schema: the part of ECMA-262 that can be held, read into a tree.

A pattern is found anywhere in a text unless it is anchored. Anchors are taken at the ends only.
Everything that looks around, back or at word boundaries is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools_bridge.json_schema.categories import of_category, unassigned
from tools_bridge.json_schema.chars import (
    BOM,
    DIGIT,
    DISPUTED,
    LAST,
    LINE_ENDS,
    SPACE,
    UNWRITTEN,
    WORD,
    Ranges,
    outside,
)
from tools_bridge.json_schema.pattern_tree import (
    ANYTHING,
    Chars,
    Either,
    Node,
    Repeat,
    Row,
    Work,
    counted,
    ends,
    lengths,
    written,
)
from tools_bridge.schemas import GrammarError, check_pattern

MOST = 1000  # repetitions that are counted


@dataclass(frozen=True, slots=True)
class Pattern:
    """`whole` matches a text from end to end only if the pattern `text` is found in it, whoever reads it;
    `ecma` exactly if it is by ECMA-262. None: it is the same."""

    text: str
    whole: Node
    ecma: Node | None = None

    def found_in(self, text: str, work: Work | None = None) -> bool:
        """Whoever reads the pattern. A GrammarError if it takes too long."""
        return len(text) in ends(self.whole, text, frozenset({0}), work or Work())

    def matches(self, text: str, work: Work | None = None) -> bool:
        """By ECMA-262. A GrammarError if it takes too long."""
        return len(text) in ends(self.ecma or self.whole, text, frozenset({0}), work or Work())

    @property
    def lengths(self) -> tuple[int, int | None]:
        """Of the shortest and longest text; None: no end."""
        return lengths(self.whole)

    def source(self, where: str, apart: Ranges = ()) -> str:
        """An expression of the same that matches from end to end, without most control characters and what is
        `apart`."""
        try:
            return written(self.whole, outside((*UNWRITTEN, *apart)))
        except ValueError:
            raise GrammarError(
                f"{where}: the pattern {self.text[:60]!r} asks for a character that cannot be held"
            ) from None

    def of_length(self, least: int, most: int | None) -> Pattern | None:
        """With the length held, too; None where that cannot be said."""
        low, high = self.lengths
        if low >= least and (most is None or (high is not None and high <= most)):
            return self
        node = counted(self.whole, least, most)
        return None if node is None else Pattern(self.text, node)


def read_pattern(text: str, where: str, *, ours: bool = False) -> Pattern:
    """GrammarError where it cannot be held. `ours`: it was written here, and may be longer."""
    if not ours:
        check_pattern(text, where)
    what = f"{where}: the pattern {text[:60]!r}"
    whole, ecma = _Reader(text, what).all(), _Reader(text, what, ecma=True).all()
    return Pattern(text, whole, None if ecma == whole else ecma)


def read_whole(text: str, where: str) -> Node:
    """A regular expression that matches texts from end to end, as xgrammar reads it: `.` is any character.
    GrammarError where it cannot be read."""
    return _WholeReader(text, f"{where}: the pattern {text[:60]!r}", ecma=True).all()


class _Reader:
    any_char: Ranges = outside(LINE_ENDS)

    def __init__(self, text: str, what: str, *, ecma: bool = False) -> None:
        self._text = text
        self._ecma = ecma
        self._what = what
        self._at = 0

    def all(self) -> Node:
        nodes = [self._anchored()]
        while self._take("|"):
            nodes.append(self._anchored())
        if self._at < len(self._text):
            raise self._no("has a parenthesis too many")
        return nodes[0] if len(nodes) == 1 else Either(tuple(nodes))

    def _anchored(self) -> Node:
        start = self._take("^")
        nodes = self._row()
        end = self._take("$")
        if self._next() not in ("|", ""):
            raise self._no("has an anchor within, which cannot be held")
        return Row((*(() if start else (ANYTHING,)), *nodes, *(() if end else (ANYTHING,))))

    def _row(self) -> list[Node]:
        nodes: list[Node] = []
        while self._next() not in ("", "|", ")", "$"):
            nodes.append(self._repeated(self._one()))
        return nodes

    def _one(self) -> Node:
        char = self._char()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return Chars(self.any_char)
        if char == "\\":
            return Chars(self._escape(in_class=False))
        if char in "*+?{})^":
            raise self._no(f"has {char!r} where it means nothing" if char != "^" else "has an anchor within")
        return Chars(((ord(char), ord(char)),))

    def _group(self) -> Node:
        if self._take("?") and not self._take(":"):
            if self._take("<") and self._next() not in ("=", "!"):
                while self._char() != ">":
                    pass
            else:
                raise self._no("looks around, which cannot be held")
        nodes: list[Node] = [Row(tuple(self._row()))]
        while self._take("|"):
            nodes.append(Row(tuple(self._row())))
        if not self._take(")"):
            raise self._no("has an anchor within or a group without an end")
        return nodes[0] if len(nodes) == 1 else Either(tuple(nodes))

    def _repeated(self, node: Node) -> Node:
        least, most = self._count()
        if (least, most) == (1, 1):
            return node
        self._take("?")  # lazy: the same texts
        if self._next() in ("*", "+", "?", "{") and self._next():
            raise self._no("repeats a repetition")
        return Repeat(node, least, most)

    def _count(self) -> tuple[int, int | None]:
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        if not self._take("{"):
            return 1, 1
        inner = ""
        while (char := self._char()) != "}":
            inner += char
        low, comma, high = inner.partition(",")
        if not (low.isascii() and low.isdigit()) or (high and not (high.isascii() and high.isdigit())):
            raise self._no(f"has {{{inner}}}, which is no count")
        least = int(low[:9])
        most = None if comma and not high else int(high[:9]) if high else least
        if least > MOST or (most or 0) > MOST or (most is not None and most < least):
            raise self._no(f"repeats {{{inner}}} times; at most {MOST} can be counted")
        return least, most

    def _class(self) -> Chars:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while (char := self._char()) != "]":
            low = self._escape(in_class=True) if char == "\\" else ((ord(char), ord(char)),)
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._char()
                char = self._char()
                high = self._escape(in_class=True) if char == "\\" else ((ord(char), ord(char)),)
                if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][1] or low[0][0] != low[0][1]:
                    raise self._no("has a range without ends")
                low = ((low[0][0], high[0][1]),)
            ranges += low
        if negated and not self._ecma:
            ranges += [
                pair for letter in DISPUTED if f"\\{letter}" in self._text for pair in DISPUTED[letter]
            ]
            if "\\p" in self._text.lower():
                ranges += unassigned()
        found = outside(ranges) if negated else outside(outside(ranges))
        if not found:
            raise self._no("has a class without characters")
        return Chars(found)

    def _escape(self, *, in_class: bool) -> Ranges:
        char = self._char()
        found = self._set(char)
        if found is not None:
            return found
        plain = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
        if in_class:
            plain["b"] = 8
        if char in plain and not (char == "0" and self._next().isdigit()):
            return ((plain[char], plain[char]),)
        if char == "x":
            code = self._hex(2)
        elif char == "u" and self._take("{"):
            digits = ""
            while (digit := self._char()) != "}":
                digits += digit
            code = self._number(digits[:8])
        elif char == "u":
            code = self._hex(4)
        elif char == "c" and self._next().isascii() and self._next().isalpha():
            code = ord(self._char()) % 32
        elif char.isalnum():
            raise self._no(f"has \\{char}, which cannot be held")
        else:
            code = ord(char)
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            raise self._no("names half a character")
        return ((code, code),)

    def _set(self, char: str) -> Ranges | None:
        """What an escape of many characters stands for."""
        known = {"d": DIGIT, "w": WORD, "s": (*SPACE, BOM) if self._ecma else SPACE}
        if char in known:
            return known[char]
        if char.lower() in known:
            return outside(known[char.lower()] + (() if self._ecma else DISPUTED[char.lower()]))
        return self._category(negated=char == "P") if char in ("p", "P") else None

    def _category(self, *, negated: bool) -> Ranges:
        name = ""
        if self._take("{"):
            while (char := self._char()) != "}":
                name += char
        found = of_category(name)
        if found is None:
            raise self._no(
                f"names the property {name[:40]!r}, which cannot be held; general categories can be"
            )
        return outside((*found, *(() if self._ecma else unassigned()))) if negated else found

    def _hex(self, length: int) -> int:
        digits = "".join(self._char() for _ in range(length))
        return self._number(digits)

    def _number(self, digits: str) -> int:
        if not digits or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise self._no("has an escape without a number")
        return int(digits, 16)

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, char: str) -> bool:
        found = self._next() == char
        self._at += found
        return found

    def _char(self) -> str:
        if self._at >= len(self._text):
            raise self._no("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _no(self, why: str) -> GrammarError:
        return GrammarError(f"{self._what} {why}")


class _WholeReader(_Reader):
    any_char = outside(())

    def _anchored(self) -> Node:
        self._take("^")
        nodes = self._row()
        self._take("$")
        if self._next() not in ("|", ""):
            raise self._no("has an anchor within, which cannot be held")
        return Row(tuple(nodes))
