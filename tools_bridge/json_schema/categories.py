r"""Unicode's general categories as ranges of characters: what `\p{..}` means in patterns.

Characters that are not assigned yet may get any category in a later version of Unicode, so that readers
disagree about them: they are of none but `Cn`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from functools import cache
from itertools import groupby

from tools_bridge.json_schema.chars import LAST, Ranges, outside

_LONG = {
    "Letter": "L",
    "Cased_Letter": "LC",
    "Uppercase_Letter": "Lu",
    "Lowercase_Letter": "Ll",
    "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm",
    "Other_Letter": "Lo",
    "Mark": "M",
    "Combining_Mark": "M",
    "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me",
    "Number": "N",
    "Decimal_Number": "Nd",
    "digit": "Nd",
    "Letter_Number": "Nl",
    "Other_Number": "No",
    "Punctuation": "P",
    "punct": "P",
    "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd",
    "Open_Punctuation": "Ps",
    "Close_Punctuation": "Pe",
    "Initial_Punctuation": "Pi",
    "Final_Punctuation": "Pf",
    "Other_Punctuation": "Po",
    "Symbol": "S",
    "Math_Symbol": "Sm",
    "Currency_Symbol": "Sc",
    "Modifier_Symbol": "Sk",
    "Other_Symbol": "So",
    "Separator": "Z",
    "Space_Separator": "Zs",
    "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp",
    "Other": "C",
    "Control": "Cc",
    "cntrl": "Cc",
    "Format": "Cf",
    "Private_Use": "Co",
}
"""As ECMA-262 and PropertyValueAliases.txt have them. Without halves of characters, which no text has, and
without those that are not assigned."""
_SHORT = frozenset(_LONG.values())
_PREFIXES = ("gc=", "General_Category=")


def of_category(name: str) -> Ranges | None:
    """The assigned characters of a category, by its short or long name, as ECMA-262 writes it. None: it is
    no category that can be held."""
    if name == "ASCII":
        return ((0, 127),)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    short = _LONG.get(name, name)
    return _ranges(short) if short in _SHORT else None


@cache
def unassigned() -> Ranges:
    return _of_each()["Cn"]


@cache
def _ranges(short: str) -> Ranges:
    wanted = ("Lu", "Ll", "Lt") if short == "LC" else (short,)
    found = [
        pair
        for kind, ranges in _of_each().items()
        if kind.startswith(wanted) and kind not in ("Cn", "Cs")
        for pair in ranges
    ]
    return outside(outside(found))


@cache
def _of_each() -> Mapping[str, Ranges]:
    """By the Unicode version of this Python."""
    found: dict[str, list[tuple[int, int]]] = {}
    at = 0
    for kind, run in groupby(map(unicodedata.category, map(chr, range(LAST + 1)))):
        length = sum(1 for _ in run)
        found.setdefault(kind, []).append((at, at + length - 1))
        at += length
    return {kind: tuple(ranges) for kind, ranges in found.items()}
