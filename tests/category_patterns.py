r"""Patterns with `\p{..}`: (the pattern, what it says, texts that it matches, others)."""

import unicodedata


def kind(char):
    return unicodedata.category(char)


def letters(text):
    return all(kind(char)[0] == "L" for char in text)


HELD = [
    (r"^\p{L}+$", letters, ["a", "Größe", "日本語", "ß"], ["", "1", "a b", "a1"]),
    (
        r"^\p{Lu}\p{Ll}*$",
        lambda t: kind(t[0]) == "Lu" and all(kind(c) == "Ll" for c in t[1:]),
        ["Éa"],
        ["éa"],
    ),
    (r"^\P{L}+$", lambda t: all(kind(c)[0] != "L" for c in t), ["12 €", "🙂"], ["a", "1a", "\u0378"]),
    (r"^[^\p{L}\p{N}]+$", lambda t: all(kind(c)[0] not in "LN" for c in t), ["-€"], ["a", "٣", "\u0378"]),
    (
        r"^[\p{L}\p{M}' .-]{1,20}$",
        lambda t: 0 < len(t) < 21,
        ["José O'Neil", "न" + "\u0941"],
        ["a1", "a" * 21],
    ),
    (r"^\p{L}{1,50}$", lambda t: letters(t) and 0 < len(t) < 51, ["é" * 50, "a"], ["a" * 51, "é" * 49 + "1"]),
    (r"\p{Nd}", lambda t: any(kind(c) == "Nd" for c in t), ["a1", "٣"], ["a", "Ⅷ"]),
    (r"^[^\P{Lu}]$", lambda t: kind(t) == "Lu", ["A", "Ω"], ["a", "\u0378", "1"]),
    (
        r"^\p{gc=Sc}\p{General_Category=Decimal_Number}\p{ASCII}$",
        lambda t: len(t) == 3,
        ["€٣x"],
        ["€xx", "€1é"],
    ),
]
