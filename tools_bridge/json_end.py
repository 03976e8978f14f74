"""Finds where a JSON object ends while it is still being written, and reads such objects whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools_bridge.parser import Rest
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step

MAX_JUNK = 4096  # characters between an object and its closing mark; after more than that none is awaited

_IN_STRING = re.compile(r'["\\]')
# Brackets and strings, and what is no JSON at all outside a string: there the object is broken off.
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w:,.+\-]')
_CLOSERS = {"{": "}", "[": "]"}


class JsonEnd:
    """Follows strings and brackets to the brace that ends the object. Does not check what is between."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Read `text`, an object from its brace on, from `at`; the index behind what belongs to it."""
        while at < len(text) and not (self.done or self.failed):
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._in_string:
                found = _IN_STRING.search(text, at)
                if found is None:
                    return len(text)
                at = found.end()
                self._escaped = found.group() == "\\"
                self._in_string = self._escaped
            else:
                found = _OUTSIDE.search(text, at)
                if found is None:
                    return len(text)
                at = self._bracket(found.group(), found.start())
        return at

    def _bracket(self, char: str, at: int) -> int:
        if char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
        elif char == '"':
            self._in_string = True
        elif self._closers and self._closers[-1] == char:
            self._closers.pop()
            self.done = not self._closers
        else:
            self.failed = True
            return at
        return at + 1


def give_object(source: Source, reply: Reply, *awaited: str) -> Step[str]:
    """Hand on the JSON object that comes next as the open call's arguments; what is wrong with it, as
    `Reply.close` has it: "" if it is whole, "truncated", "malformed". `awaited`: what may be before it."""
    yield from source.blanks()
    if (yield from source.peek()) != "{":
        return "truncated" if source.stops_in(*awaited) else "malformed"
    end = JsonEnd()
    while True:
        reply.arguments(source.take(end.feed(source.text, source.at)))
        if end.done:
            return ""
        if end.failed:
            return "malformed"
        if source.ended:
            return "truncated"
        yield


class Closing:
    """The end of a call that is a JSON object and a closing mark. Models forget the mark: then what comes
    there is text. Something between object and mark, though, belongs to the call and spoils it."""

    def __init__(self, mark: str, opening: Sequence[str]) -> None:
        """`opening`: marks that begin something else."""
        self._mark = mark
        self._marks = Marks(mark, *opening)
        self._rest = Rest((mark,), opening)

    def read(self, source: Source, reply: Reply, error: str, verdict: str = "") -> Step[None]:
        """Close the open call, whose object had this `error`. `verdict`: what is wrong with a whole one."""
        error = error or verdict or ("" if reply.runs else "malformed")
        if error:
            yield from self._rest.skip(source)
            return reply.close(error)
        blanks = yield from source.blanks()
        junk, found = yield from source.upto(self._marks, MAX_JUNK)
        if found == self._mark:
            return reply.close("malformed" if junk else "")
        source.at -= len(found)
        reply.close()
        if found or not self._mark.startswith(junk):  # the text may end within the mark
            reply.say(blanks + junk)
