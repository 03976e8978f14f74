"""The patterns that pydantic (up to 2.12) writes for decimals. They look ahead; what they say can be said
without, for numbers that are written plainly: digits, and at most one point."""

from __future__ import annotations

import re

_START = r"^(?!^[-+.]*$)[+-]?0*"
_BOTH = _START + r"(?:\d{0,<whole>}|(?=[\d.]{1,<all>}0*$)\d{0,<also>}\.\d{0,<places>}0*$)"
_DIGITS = _START + r"(?:\d{0,<whole>}|(?=[\d.]{1,<all>}0*$)\d*\.\d*0*$)"
_PLACES = _START + r"\d*\.?\d{0,<places>}0*$"
_ANY = _START + r"\d*\.?\d*$"


def told_plainly(pattern: str) -> str:
    """The pattern, or one that lets through some of what it does and does not look ahead."""
    if not pattern.startswith(_START):
        return pattern
    if pattern == _ANY:
        return r"^[+-]?(\d+\.?\d*|\.\d+)$"
    for form in (_BOTH, _DIGITS, _PLACES):
        found = _counts(form, pattern)
        if found is None:
            continue
        whole, places = found.get("whole"), found.get("places")
        if whole is None:
            return rf"^[+-]?\d+(\.\d{{0,{places}}})?$"
        if whole == 0:
            return rf"^[+-]?0*\.\d{{1,{places}}}$" if places else pattern
        return rf"^[+-]?\d{{1,{whole}}}" + (rf"(\.\d{{0,{places}}})?$" if places else "$")
    return pattern


def _counts(form: str, pattern: str) -> dict[str, int] | None:
    wanted = re.sub(r"<(\w+)>", r"(?P<\1>[0-9]{1,3})", re.escape(form))
    found = re.fullmatch(wanted, pattern)
    return None if found is None else {name: int(count) for name, count in found.groupdict().items()}
