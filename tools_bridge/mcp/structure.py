"""How much there is in JSON that has not been parsed, by a scan that costs next to nothing. Pure.

Each object, list and value costs whoever parses and checks it far more than a character does: replies of few
bytes may hold up everybody for seconds.
"""

from __future__ import annotations

OBJECT = 8  # what one costs: a list, a value or a line costs 1


class Structure:
    """What pieces of a reply come to, JSON or events of JSON. Pieces may begin and end anywhere."""

    def __init__(self) -> None:
        self._inside = False  # a string
        self._escape = b""  # half of one

    def cost(self, piece: bytes) -> int:
        """Of the next piece. Strings have no ends of lines, so each line begins outside of them: what is no
        JSON in an event stream hides nothing of the lines behind it."""
        lines = piece.replace(b"\r", b"\n").split(b"\n")
        found = self._line(lines[0])
        for line in lines[1:]:
            self._inside, self._escape = False, b""
            found += 1 + self._line(line)
        return found

    def _line(self, line: bytes) -> int:
        line = (self._escape + line).replace(rb"\\", b"")
        self._escape = b"\\" if line.endswith(b"\\") else b""
        parts = line.replace(rb"\"", b"").split(b'"')
        plain = b"".join(parts[self._inside :: 2])
        self._inside ^= len(parts) % 2 == 0
        return OBJECT * plain.count(b"{") + plain.count(b"[") + plain.count(b",")
