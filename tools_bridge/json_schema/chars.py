"""Sets of characters, as ranges of code points."""

from __future__ import annotations

from collections.abc import Sequence

Ranges = tuple[tuple[int, int], ...]

DIGIT = ((48, 57),)
WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: Ranges = (
    (9, 13),
    (32, 32),
    (160, 160),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
# What is no digit, word character or space: engines disagree beyond (Unicode digits and letters), so it is
# left out.
DISPUTED = {
    "d": ((0x660, 0x10FFFF),),
    "w": ((0x80, 0x10FFFF),),
    "s": ((28, 31), (0x85, 0x85), (0xFEFF, 0xFEFF)),
}
BOM = (0xFEFF, 0xFEFF)  # a space in ECMA-262
LAST = 0x10FFFF
CONTROLS: Ranges = ((0, 31),)
UNWRITTEN: Ranges = ((0, 7), (11, 11), (14, 31))  # those that JSON has no letter for, as it has \n
# Characters of one length in UTF-8. Of a class that has several, xgrammar makes bytes that are no characters.
SIZES = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST))
NOT_CHARS = ((0xD800, 0xDFFF),)  # halves of surrogate pairs: no text has them
LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))


def outside(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """All characters but these."""
    found: list[tuple[int, int]] = []
    at = 0
    for low, high in sorted([*ranges, *NOT_CHARS]):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return (*found, (at, LAST)) if at <= LAST else tuple(found)
