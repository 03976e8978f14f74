"""Tool calls in the Hermes / Qwen form, read from text while it is still being written.

    text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text

What a text means is a pure function of it (`parse`); `DeltaTracker` computes the same function
piece by piece, in time linear in the text, whatever the pieces. The rules:

- The call's JSON ends where its braces say, never at a tag inside a string.
- A call counts as opened once its name is known. A `<tool_call>` that turns out not to begin a
  JSON object with a name is plain text, and nothing of it is lost.
- A call the text ends within is "truncated"; where not even its name is known, what there is of it
  is shown as text. One that is no JSON object with arguments by `json_value` is "malformed".
  Neither is ever repaired.
- No arguments, `null` and a blank string all mean `{}`. Arguments given as a JSON string are
  that string's content.
- Blanks around calls belong to no one: they are dropped, but where text goes on after a call, the
  blanks before the call stay between the two texts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum

from tools_bridge.deltas import (
    ArgumentsDelta,
    CallClosed,
    CallOpened,
    ContentDelta,
    Delta,
    Parsed,
    PartialCall,
    joined,
)
from tools_bridge.json_scan import BLANKS, ObjectScanner, Piece
from tools_bridge.json_value import JsonError, is_text, parse_arguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")
_BLANKS = re.compile(f"[{BLANKS}]*")


def parse(text: str, final: bool = True) -> Parsed:
    """What `text` holds; if not `final`, without what only more text can decide."""
    tracker = DeltaTracker()
    tracker.feed(text)
    if final:
        tracker.finish()
    return tracker.parsed


class _State(Enum):
    TEXT = 0
    OBJECT = 1  # after the opening tag: blanks, then the object
    CLOSING = 2  # after the object: blanks, then a tag
    JUNK = 3  # something else came; what it is depends on the tag that follows
    SKIP = 4  # the rest of a malformed call


@dataclass(slots=True)
class _Call:
    name: str = ""
    given: list[str] = field(default_factory=list)  # arguments text handed out
    held: list[str] = field(default_factory=list)  # arguments value not yet handed out
    name_parts: list[str] = field(default_factory=list)
    name_seen: bool = False
    arguments_seen: bool = False  # the whole value
    malformed: bool = False
    index: int = -1  # -1 until opened


class DeltaTracker:
    """Turns text, as it comes, into deltas: joined, they are `parse` of the whole text."""

    def __init__(self) -> None:
        self._state = _State.TEXT
        self._text, self._at = "", 0  # received, and how much of it is decided
        self._raw: list[str] = []  # the opening tag and the call's object
        self._blanks: list[str] = []  # after the last content
        self._after_call = False
        self._finished = False
        self._scanner = ObjectScanner()
        self._call = _Call()
        self._junk: list[str] = []
        self._cut = False
        self._content: list[str] = []
        self._calls: list[tuple[_Call, str | None]] = []
        self._out: list[Delta] = []

    @property
    def parsed(self) -> Parsed:
        """Everything found so far."""
        calls = tuple(
            PartialCall(call.name, "".join(call.given), complete=error == "", error=error or "")
            for call, error in self._calls
        )
        return Parsed("".join(self._content), calls, self._cut)

    def feed(self, text: str) -> list[Delta]:
        """Take in more text; what it decided."""
        if self._finished:
            raise RuntimeError("text after the end")
        self._text, self._at = self._text[self._at :] + text, 0
        steps = {
            _State.TEXT: self._read_text,
            _State.OBJECT: self._read_object,
            _State.CLOSING: self._read_closing,
            _State.JUNK: self._read_junk,
            _State.SKIP: self._read_skip,
        }
        while steps[self._state]():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """The text has ended; what that decided."""
        self._finished = True
        tail = self._until(len(self._text))
        if self._state is _State.TEXT:
            self._add_content(tail)
        elif self._state is _State.OBJECT:
            if self._call.index < 0:
                self._cut = True
                self._add_content("".join(self._raw) + tail)
            else:
                self._close("truncated")
        elif self._state is _State.SKIP:
            self._close("malformed")
        else:
            self._close("")
            self._add_content("".join(self._junk) + (tail if self._state is _State.JUNK else ""))
        if not self._after_call and self._blanks:
            self._put_content("".join(self._blanks))
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return joined(out)

    # --- one step each: True if something was decided and there may be more ---------------

    def _read_text(self) -> bool:
        at = self._text.find(OPEN, self._at)
        if at < 0:
            keep = _overlap(self._text, self._at, OPEN)
            self._add_content(self._until(len(self._text) - keep))
            return False
        self._add_content(self._until(at))
        self._at += len(OPEN)
        self._raw, self._junk = [OPEN], []
        self._scanner, self._call = ObjectScanner(), _Call()
        self._state = _State.OBJECT
        return True

    def _read_object(self) -> bool:
        at, piece = self._scanner.feed(self._text, self._at)
        self._raw.append(self._until(at))
        if piece is not None:
            self._take_piece(piece)
        if self._scanner.done or self._scanner.failed or self._call.malformed:
            self._end_object()
            return True
        return piece is not None and piece.last

    def _end_object(self) -> None:
        call = self._call
        if call.index < 0:  # never had a name: it was text after all
            self._state = _State.TEXT
            self._add_content("".join(self._raw))
            return
        if self._scanner.failed or call.malformed:
            self._state = _State.SKIP
            return
        if not call.arguments_seen:
            self._give("{}")
        self._state = _State.CLOSING

    def _read_closing(self) -> bool:
        found = _BLANKS.match(self._text, self._at)
        self._at = found.end() if found else self._at
        if self._text.startswith(CLOSE, self._at):
            self._at += len(CLOSE)
            self._close("")
            self._state = _State.TEXT
        elif self._text.startswith(OPEN, self._at):  # the closing tag was forgotten
            self._close("")
            self._state = _State.TEXT
        elif any(_overlap(self._text, self._at, tag) == len(self._text) - self._at for tag in (OPEN, CLOSE)):
            return False
        else:
            self._state = _State.JUNK
        return True

    def _read_junk(self) -> bool:
        before, tag = self._to_tag()
        self._junk.append(before)
        if not tag:
            return False
        if tag == CLOSE:
            self._close("malformed")
        else:  # a call without its closing tag, text, another call
            self._close("")
            self._add_content("".join(self._junk))
        self._junk = []
        self._state = _State.TEXT
        return True

    def _read_skip(self) -> bool:
        _, tag = self._to_tag()
        if not tag:
            return False
        self._close("malformed")
        self._state = _State.TEXT
        return True

    def _to_tag(self) -> tuple[str, str]:
        """Consume up to the next tag, and the tag itself if it is the closing one."""
        found = _TAG.search(self._text, self._at)
        if found is None:
            keep = max(_overlap(self._text, self._at, tag) for tag in (OPEN, CLOSE))
            return self._until(len(self._text) - keep), ""
        before = self._until(found.start())
        if found.group() == CLOSE:
            self._at = found.end()
        return before, found.group()

    def _until(self, end: int) -> str:
        """Consume up to index `end`."""
        text, self._at = self._text[self._at : end], end
        return text

    # --- calls --------------------------------------------------------------------------

    def _take_piece(self, piece: Piece) -> None:
        call = self._call
        if piece.key == "name" and not call.name_seen:
            call.name_parts.append(piece.text)
            if piece.last:
                self._open("".join(call.name_parts))
        elif piece.key == "arguments" and not call.arguments_seen:
            call.held.append(piece.text)
            call.arguments_seen = piece.last
        elif piece.key in ("name", "arguments") and piece.last:
            call.malformed = True  # given twice: which one counts is anyone's guess
        if call.held and call.index >= 0:
            self._give_held()

    def _open(self, raw: str) -> None:
        call = self._call
        call.name_seen = True
        name = _loads(raw)
        if not isinstance(name, str) or not name or not is_text(name):
            call.malformed = True
            return
        call.name, call.index = name, len(self._calls)
        self._calls.append((call, None))
        self._after_call = True
        if not self._content:
            self._blanks = []
        self._out.append(CallOpened(call.index, name))

    def _give_held(self) -> None:
        call = self._call
        is_object = bool(call.given) or call.held[0].startswith("{")
        if not (is_object or call.arguments_seen):
            return  # a string or a null stands for something else: wait for all of it
        raw, call.held = "".join(call.held), []
        if is_object:
            self._give(raw)
            return
        value = _loads(raw)
        text = value if isinstance(value, str) and is_text(value) else raw
        self._give("{}" if value is None or not text.strip() else text)

    def _give(self, text: str) -> None:
        self._call.given.append(text)
        self._out.append(ArgumentsDelta(self._call.index, text))

    def _close(self, error: str) -> None:
        call = self._call
        if not error and not (isinstance(_loads("".join(self._raw[1:])), dict) and _runs(call)):
            error = "malformed"
        self._calls[call.index] = (call, error)
        self._out.append(CallClosed(call.index, error))

    # --- content ------------------------------------------------------------------------

    def _add_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip(BLANKS)
        body = text.rstrip(BLANKS)
        if body:
            self._put_content("".join(self._blanks) + body)
            self._blanks = []
            self._after_call = False
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])

    def _put_content(self, text: str) -> None:
        self._content.append(text)
        self._out.append(ContentDelta(text))


def _overlap(text: str, start: int, tag: str) -> int:
    """Length of the longest end of `text[start:]` that is a proper beginning of `tag`."""
    for length in range(min(len(text) - start, len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def _runs(call: _Call) -> bool:
    """Whether the arguments are what everybody behind this parser takes for arguments."""
    try:
        parse_arguments("".join(call.given))
    except JsonError:
        return False
    return True


_BROKEN = object()


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _loads(raw: str) -> object:
    """The JSON value of `raw`, or a value of no JSON type if there is none."""
    try:
        value: object = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _BROKEN
    return value
