"""A reply as it is taken apart: content, reasoning and calls, in deltas and as a whole.

White space around calls and reasoning belongs to no one and is dropped; where content goes on after a
call, that before the call and that behind it stay between the two texts.
"""

from __future__ import annotations

from tools_bridge.deltas import (
    ArgumentsDelta,
    CallClosed,
    CallOpened,
    ContentDelta,
    Delta,
    Parsed,
    PartialCall,
    ReasoningDelta,
    joined,
)
from tools_bridge.json_scan import BLANKS
from tools_bridge.json_value import JsonError, parse_arguments


class _Text:
    """One kind of text, with the white space at its edges held back."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.blanks: list[str] = []  # after the last part
        self.fresh = False  # white space that comes next is dropped
        self.aside = False  # something else came after the last part: `blanks` are dropped at the end

    def add(self, text: str, *, verbatim: bool = False) -> str:
        """What of it is certain to be shown. `verbatim`: once there is some, white space is."""
        if verbatim and self.parts and not self.fresh and not self.blanks:
            self.parts.append(text)
            return text
        if self.fresh:
            text = text.lstrip(BLANKS)
        body = text.rstrip(BLANKS)
        shown = ""
        if body:
            shown = "".join(self.blanks) + body
            self.parts.append(shown)
            self.blanks = []
            self.fresh = self.aside = False
        if len(body) < len(text):
            self.blanks.append(text[len(body) :])
        return shown


class Reply:
    """Takes what a parser finds, in order. One call is open at a time."""

    def __init__(self) -> None:
        self._content = _Text()
        self._reasoning = _Text()
        self._reasoning.fresh = True
        self._calls: list[PartialCall] = []
        self._given: list[str] = []  # the open call's arguments
        self._name: str | None = None
        self._cut: list[str] | None = None
        self.thinking = False
        self.verbatim = False  # no call can come: white space in the content waits for nothing
        self._out: list[Delta] = []

    @property
    def blank(self) -> bool:
        """Nothing but white space was said or called so far."""
        return not self._content.parts and not self._calls and self._name is None

    @property
    def called(self) -> bool:
        """There was a call."""
        return bool(self._calls)

    @property
    def runs(self) -> bool:
        """The open call's arguments are what everybody behind this parser takes for arguments."""
        given = "".join(self._given)
        try:
            parse_arguments(given, unique=True)  # a key given twice: which value counts is anyone's guess
        except JsonError:
            return False
        return bool(given.strip())

    @property
    def parsed(self) -> Parsed:
        calls = [*self._calls]
        if self._name is not None:
            calls.append(PartialCall(self._name, "".join(self._given)))
        return Parsed(
            "".join(self._content.parts), tuple(calls), self._cut is not None, "".join(self._reasoning.parts)
        )

    def say(self, text: str) -> None:
        """Text: content, or reasoning while the reply is `thinking`."""
        if self._cut is not None:
            self._cut.append(text)
        elif self.thinking:
            if shown := self._reasoning.add(text):
                self._out.append(ReasoningDelta(shown))
        elif shown := self._content.add(text, verbatim=self.verbatim):
            self._out.append(ContentDelta(shown))

    def think(self) -> None:
        """Reasoning begins, here or again; then on a new line."""
        self.thinking = True
        self._aside()

    def end_thinking(self) -> None:
        self.thinking = False
        self._reasoning.blanks = ["\n"] if self._reasoning.parts else []
        self._reasoning.fresh = True

    def open(self, name: str) -> None:
        """A call whose name is known."""
        self._name, self._given = name, []
        if self.thinking:
            self.end_thinking()
        self._content.aside = True
        if not self._content.parts:
            self._aside()
        self._out.append(CallOpened(len(self._calls), name))

    def arguments(self, text: str) -> None:
        if text:
            self._given.append(text)
            self._out.append(ArgumentsDelta(len(self._calls), text))

    def close(self, error: str = "") -> None:
        """The open call has ended; without an `error` its arguments are checked once more."""
        if not error and not self.runs:
            error = "malformed"
        given = "".join(self._given)
        self._out.append(CallClosed(len(self._calls), error))
        self._calls.append(PartialCall(self._name or "", given, complete=not error, error=error))
        self._name = None

    def cut(self, text: str) -> None:
        """The text ended in the beginning of a call that has no name yet, `text` and what still comes."""
        self._cut = [text]

    def finish(self, *, cut: bool) -> None:
        """The end. The beginning of a call was said if the reply ended there by itself; one that was `cut`
        off is of no use to anyone."""
        if self._cut is not None and not cut:
            begun, self._cut = "".join(self._cut), None
            self.say(begun)
            self._cut = []
        if not (self._content.fresh or self._content.aside) and self._content.blanks:
            rest = "".join(self._content.blanks)
            self._content.parts.append(rest)
            self._out.append(ContentDelta(rest))

    def take(self) -> list[Delta]:
        """What was found since the last time."""
        out, self._out = self._out, []
        return joined(out)

    def _aside(self) -> None:
        """Something that is no content comes, or has come."""
        self._content.fresh = True
        if not self._content.parts:
            self._content.blanks = []
