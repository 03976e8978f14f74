"""Tool calls in the Hermes / Qwen form, read from text while it is still being written.

    text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text

What a text means is a pure function of it (`parse`); `DeltaTracker` computes the same function
piece by piece, in time linear in the text, whatever the pieces. The rules:

- The call's JSON ends where its braces say, never at a tag inside a string.
- A call counts as opened once its name is known. A `<tool_call>` that turns out not to begin a
  JSON object with a name is plain text, and nothing of it is lost.
- A call the text ends within is "truncated", one that is no JSON object with an object of
  arguments is "malformed". Neither is ever repaired.
- No arguments, `null` and a blank string all mean `{}`. Arguments given as a JSON string are
  that string's content.
- Blanks around calls belong to no one: they are dropped, but where text goes on after a call, the
  blanks before the call stay between the two texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum

from tools_bridge.json_scan import BLANKS, ObjectScanner, Piece

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class PartialCall:
    """A call as far as it is known. `complete` calls are whole, well-formed and may be run."""

    name: str
    arguments: str = ""  # raw JSON text so far
    complete: bool = False
    error: str = ""  # "truncated" or "malformed": never to be run


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a text holds. `rest` is the beginning of a call whose name the text does not reach."""

    content: str
    calls: tuple[PartialCall, ...]
    rest: str = ""

    @property
    def truncated(self) -> bool:
        """Whether the text ended inside a call."""
        return bool(self.rest) or any(call.error == "truncated" for call in self.calls)


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    index: int
    error: str  # as `PartialCall.error`; "" for a complete call


Delta = ContentDelta | CallOpened | ArgumentsDelta | CallClosed


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
        self._text = ""  # received and undecided
        self._raw: list[str] = []  # of a call without a name so far
        self._blanks: list[str] = []  # after the last content
        self._after_call = False
        self._finished = False
        self._scanner = ObjectScanner()
        self._call = _Call()
        self._junk: list[str] = []
        self._rest = ""
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
        return Parsed("".join(self._content), calls, self._rest)

    def feed(self, text: str) -> list[Delta]:
        """Take in more text; what it decided."""
        if self._finished:
            raise RuntimeError("text after the end")
        self._text += text
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
        if self._state is _State.TEXT:
            self._add_content(self._text)
        elif self._state is _State.OBJECT:
            if self._call.index < 0:
                self._rest = "".join(self._raw) + self._text
            else:
                self._close("truncated")
        elif self._state is _State.SKIP:
            self._close("malformed")
        else:
            self._close("")
            self._add_content("".join(self._junk) + (self._text if self._state is _State.JUNK else ""))
        if not self._after_call and self._blanks:
            self._put_content("".join(self._blanks))
        self._text = ""
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return _joined(out)

    # --- one step each: True if something was decided and there may be more ---------------

    def _read_text(self) -> bool:
        at = self._text.find(OPEN)
        if at < 0:
            keep = _overlap(self._text, OPEN)
            self._add_content(self._text[: len(self._text) - keep])
            self._text = self._text[len(self._text) - keep :]
            return False
        self._add_content(self._text[:at])
        self._begin_call(self._text[at + len(OPEN) :])
        return True

    def _begin_call(self, text: str) -> None:
        self._text = text
        self._raw, self._junk = [OPEN], []
        self._scanner, self._call = ObjectScanner(), _Call()
        self._state = _State.OBJECT

    def _read_object(self) -> bool:
        at, pieces = self._scanner.feed(self._text, 0)
        if self._call.index < 0:
            self._raw.append(self._text[:at])
        self._text = self._text[at:]
        for piece in pieces:
            self._take_piece(piece)
        if self._scanner.done or self._scanner.failed or self._call.malformed:
            self._end_object()
            return True
        return False

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
        self._text = self._text.lstrip(BLANKS)
        if self._text.startswith(CLOSE):
            self._text = self._text[len(CLOSE) :]
            self._close("")
            self._state = _State.TEXT
        elif self._text.startswith(OPEN):  # the closing tag was forgotten
            self._close("")
            self._state = _State.TEXT
        elif OPEN.startswith(self._text) or CLOSE.startswith(self._text):
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
        found = [(at, tag) for tag in (OPEN, CLOSE) if (at := self._text.find(tag)) >= 0]
        if not found:
            keep = max(_overlap(self._text, OPEN), _overlap(self._text, CLOSE))
            before, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
            return before, ""
        at, tag = min(found)
        before = self._text[:at]
        self._text = self._text[at + (len(CLOSE) if tag == CLOSE else 0) :]
        return before, tag

    # --- calls --------------------------------------------------------------------------

    def _take_piece(self, piece: Piece) -> None:
        call = self._call
        if call.malformed:
            return
        if piece.key == "name":
            call.malformed = call.name_seen
            call.name_parts.append(piece.text)
            if piece.last:
                self._open("".join(call.name_parts))
        elif piece.key == "arguments":
            call.malformed = call.arguments_seen
            call.held.append(piece.text)
            call.arguments_seen = call.arguments_seen or piece.last
        if call.held and call.name_seen and not call.malformed:
            self._give_held()

    def _open(self, raw: str) -> None:
        call = self._call
        call.name_seen = True
        name = _loads(raw)
        if not isinstance(name, str) or not name:
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
        text = value if isinstance(value, str) else raw
        self._give("{}" if value is None or not text.strip() else text)

    def _give(self, text: str) -> None:
        self._call.given.append(text)
        self._out.append(ArgumentsDelta(self._call.index, text))

    def _close(self, error: str) -> None:
        call = self._call
        if not error and not isinstance(_loads("".join(call.given)), dict):
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


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


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


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbouring text deltas of the same kind made one."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            out[-1] = ArgumentsDelta(delta.index, last.text + delta.text)
        else:
            out.append(delta)
    return out
