"""Text that comes in pieces, for readers that are written as if all of it were there.

A reader is a generator: wherever what it wants to know takes more text than there is, it yields, and
goes on when more has come or the text has ended. What it does depends on the text alone, never on
where the pieces were cut. Only what is undecided is kept (part of a mark, say), so a whole reply takes
time linear in its length, whatever the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from tools_bridge.json_scan import BLANKS

T = TypeVar("T")

Step = Generator[None, None, T]
"""A reader's step that comes to a `T`."""

_BLANKS = re.compile(f"[{BLANKS}]*")


class Marks:
    """Texts to look for. None may be part of another one, or what is found would depend on the pieces."""

    def __init__(self, *texts: str) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        if any(a in b for a in self.texts for b in self.texts if a != b):
            raise ValueError(f"one mark is part of another one: {self.texts}")
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self._heads = frozenset(text[:cut] for text in self.texts for cut in range(1, len(text)))
        self._firsts = frozenset(text[0] for text in self.texts)
        self._longest = max(map(len, self.texts), default=0)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def overlap(self, text: str, at: int) -> int:
        """Length of the longest end of `text[at:]` that begins a mark without being one."""
        start = max(at, len(text) - self._longest + 1)
        for cut in range(start, len(text)):
            if text[cut] in self._firsts and text[cut:] in self._heads:
                return len(text) - cut
        return 0


class Source:
    """The text so far, and how far it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def push(self, text: str) -> None:
        self.text, self.at = self.text[self.at :] + text, 0

    def take(self, end: int) -> str:
        """Read up to index `end` of `text`."""
        text, self.at = self.text[self.at : end], end
        return text

    @property
    def here(self) -> bool:
        """There is text that has not been read."""
        return self.at < len(self.text)

    def stops_in(self, *awaited: str) -> bool:
        """The text has ended where one of the texts `awaited` was to come, or had begun."""
        rest = self.text[self.at :]
        return self.ended and (not rest or any(text.startswith(rest) for text in awaited))

    def until(self, marks: Marks, sink: Callable[[str], None]) -> Step[str]:
        """Read up to and with the next mark and return it, "" at the end of the text; `sink` takes
        what is before it as soon as it is certain."""
        while True:
            found = marks.find(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    sink(self.take(found.start()))
                self.at = found.end()
                return found.group()
            keep = 0 if self.ended else marks.overlap(self.text, self.at)
            if len(self.text) - keep > self.at:
                sink(self.take(len(self.text) - keep))
            if self.ended:
                return ""
            yield

    def before(self, marks: Marks, sink: Callable[[str], None]) -> Step[str]:
        """As `until`, but the mark is not read."""
        mark = yield from self.until(marks, sink)
        self.at -= len(mark)
        return mark

    def accept(self, *texts: str) -> Step[str]:
        """Read the longest of `texts` that comes next and return it; "" if none does, and nothing is read."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, texts))]
            if self.ended or not any(len(text) > len(rest) and text.startswith(rest) for text in texts):
                found = max((text for text in texts if rest.startswith(text)), key=len, default="")
                self.at += len(found)
                return found
            yield

    def peek(self) -> Step[str]:
        """The next character, not read; "" at the end of the text."""
        while not self.here and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def blanks(self) -> Step[str]:
        """Read white space; what it was."""
        read: list[str] = []
        while True:
            found = _BLANKS.match(self.text, self.at)
            if found is not None and found.end() > self.at:
                read.append(self.take(found.end()))
            if self.here or self.ended:
                return "".join(read)
            yield

    def upto(self, marks: Marks, most: int) -> Step[tuple[str, str]]:
        """Read to the next mark: what is before it, and it. Where none begins within `most` characters,
        or before the text ends, the mark is "" and what was read ends there."""
        read: list[str] = []
        size = 0
        while True:
            found = marks.find(self.text, self.at)
            if found is not None and size + found.start() - self.at <= most:
                read.append(self.take(found.start()))
                self.at = found.end()
                return "".join(read), found.group()
            keep = 0 if self.ended else marks.overlap(self.text, self.at)
            piece = self.take(min(len(self.text) - keep, self.at + most - size))
            read.append(piece)
            size += len(piece)
            if (size >= most and self._beyond(marks)) or self.ended:
                return "".join(read), ""
            yield

    def _beyond(self, marks: Marks) -> bool:
        """No mark begins at once here, and none can."""
        rest = self.text[self.at :]
        return bool(rest) and not any(mark.startswith(rest) or rest.startswith(mark) for mark in marks.texts)


def drop(_: str) -> None:
    """A sink for what is no part of anything."""
