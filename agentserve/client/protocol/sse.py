"""Server-sent events, from bytes as they come to frames (WHATWG HTML, "Server-sent events"). Pure."""

from __future__ import annotations

from dataclasses import dataclass

MOST_BYTES = 32 << 20  # of one frame: an event may show all of its session's tools


@dataclass(frozen=True, slots=True)
class Frame:
    """One event. `id` is the last id that was named, by this frame or one before it."""

    id: str
    kind: str
    data: str


class FrameTooLong(ValueError):
    """What comes is no stream of events, or not one of ours."""


class SseDecoder:
    """Feed it what a connection gives, in pieces of any size; a new connection needs a new decoder. What was
    begun and not ended by an empty line is no frame."""

    def __init__(self, last_id: str = "") -> None:
        self._rest = bytearray()
        self._scanned = 0  # bytes of the rest in which no line ends
        self._id = last_id
        self._kind = ""
        self._data: list[str] = []
        self._size = 0
        self._begun = False

    def feed(self, piece: bytes) -> list[Frame]:
        """The frames that end in this piece. FrameTooLong."""
        self._rest += piece
        frames = []
        for line in self._lines():
            if not line:
                if self._data:
                    frames.append(Frame(self._id, self._kind or "message", "\n".join(self._data)))
                self._kind, self._data, self._size = "", [], 0
            elif not line.startswith(":"):
                self._field(line)
        if len(self._rest) + self._size > MOST_BYTES:
            raise FrameTooLong(f"an event of more than {MOST_BYTES >> 20} MiB")
        return frames

    def _lines(self) -> list[str]:
        """The lines that are whole. A CR at the end of what is there may be half of a CRLF: it waits."""
        lines: list[str] = []
        rest, start, place = self._rest, 0, self._scanned
        while place < len(rest):
            byte = rest[place]
            if byte == 0x0D and place + 1 == len(rest):
                break
            if byte in (0x0A, 0x0D):
                lines.append(self._text(rest[start:place]))
                place += 2 if byte == 0x0D and rest[place + 1] == 0x0A else 1
                start = place
                continue
            ends = [at for at in (rest.find(b"\n", place), rest.find(b"\r", place)) if at >= 0]
            place = min(ends, default=len(rest))
        del rest[:start]
        self._scanned = place - start
        return lines

    def _text(self, line: bytearray) -> str:
        text = line.decode("utf-8", "replace")
        if not self._begun:
            self._begun = True
            return text.removeprefix("\ufeff")
        return text

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._size += len(value)
        elif name == "event":
            self._kind = value
        elif name == "id" and "\0" not in value:
            self._id = value
