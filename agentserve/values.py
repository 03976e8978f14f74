"""Readers of single settings: a raw value from a flag or a TOML file to a typed one.

Each raises ConfigError with what it expected; the caller adds the place and the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class ConfigError(ValueError):
    """A setting that cannot be used; its text is one line for the operator."""


def text(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip() or "\0" in raw:
        raise ConfigError("expected a text that is not empty")
    return raw


def text_list(raw: object) -> tuple[str, ...]:
    """One text or a list of them."""
    if isinstance(raw, str):
        return (text(raw),)
    if not isinstance(raw, list | tuple):
        raise ConfigError("expected a text or a list of texts")
    return tuple(text(item) for item in raw)


def boolean(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ConfigError("expected true or false")
    return raw


def http_url(raw: object) -> str:
    """Without a query; a path in front of ours may be part of it."""
    if not isinstance(raw, str) or not re.fullmatch(r"https?://[!-~]+", raw) or re.search("[?#@]", raw):
        raise ConfigError("expected http(s)://host[:port][/path]")
    return raw


def path(raw: object) -> Path:
    return raw if isinstance(raw, Path) else Path(text(raw))


def choice(*allowed: str) -> Callable[[object], str]:
    """A reader that accepts exactly the texts `allowed`."""

    def read(raw: object) -> str:
        if not isinstance(raw, str) or raw not in allowed:
            raise ConfigError(f"expected one of {', '.join(allowed)}")
        return raw

    return read


def at_least(low: int, high: int | None = None) -> Callable[[object], int]:
    """A reader of integers within `low ..= high`; decimal text is accepted, booleans are not."""
    expected = f"expected an integer ≥ {low}" + (f" and ≤ {high}" if high is not None else "")

    def read(raw: object) -> int:
        if isinstance(raw, str) and re.fullmatch(r"-?\d{1,18}", raw):
            raw = int(raw)
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ConfigError(expected)
        if raw < low or (high is not None and raw > high):
            raise ConfigError(expected)
        return raw

    return read


def optional(read: Callable[[object], object]) -> Callable[[object], object]:
    """A reader that takes the word "auto" for None."""

    def read_or_auto(raw: object) -> object:
        if raw == "auto":
            return None
        return read(raw)

    return read_or_auto


def seconds(raw: object) -> float:
    """A duration in seconds, 0 to a day."""
    if isinstance(raw, str) and re.fullmatch(r"\d{1,9}(\.\d{1,9})?", raw):
        raw = float(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw <= 86400:
        raise ConfigError("expected seconds, 0 to 86400")
    return float(raw)


def positive_seconds(raw: object) -> float:
    """A duration above 0 and up to a day, in seconds."""
    return _above_zero(raw, 1.0, "seconds, above 0")


def milliseconds(raw: object) -> float:
    """A duration above 0 and up to a day, told in milliseconds; the result is in seconds."""
    return _above_zero(raw, 1e3, "milliseconds, above 0")


def _above_zero(raw: object, per_second: float, expected: str) -> float:
    if isinstance(raw, str) and re.fullmatch(r"\d{1,9}(\.\d{1,9})?", raw):
        raw = float(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 < raw <= 86400 * per_second:
        raise ConfigError(f"expected {expected}")
    return raw / per_second


def above_zero(raw: object) -> float:
    """A number above 0, at most a million."""
    return number(raw, 1e-6, 1e6)


def number(raw: object, least: float, most: float) -> float:
    if isinstance(raw, str) and re.fullmatch(r"\d{1,9}(\.\d{1,9})?", raw):
        raw = float(raw)
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not least <= raw <= most:
        raise ConfigError(f"expected a number from {least:g} to {most:g}")
    return float(raw)


def within(least: float, most: float) -> Callable[[object], float]:
    """A reader of numbers from `least` to `most`."""
    return lambda raw: number(raw, least, most)


def read(reader: Callable[[object], Value], raw: object, where: str) -> Value:
    """The value of one setting; ConfigError names the place and what was there."""
    try:
        return reader(raw)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}, got {str(raw)[:80]}") from None


def size(raw: object) -> int:
    """Bytes: an integer, or a number with a unit (512MiB is binary, 2GB is decimal)."""
    expected = "expected a size in bytes such as 512MiB or 2GB"
    if isinstance(raw, int) and not isinstance(raw, bool):
        number, unit = float(raw), ""
        exact: int | None = raw
    else:
        match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) and len(raw) < 40 else None
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(expected)
        number, unit = float(match[1]), match[2].upper()
        exact = int(match[1]) * _UNITS[unit] if match[1].isdigit() else None
    value = exact if exact is not None else int(number * _UNITS[unit])
    if not 0 < value < 2**63:
        raise ConfigError(expected)
    return value


def budget(raw: object) -> int:
    """Bytes as `size` reads them, or 0 for none."""
    if raw == "0" or (raw == 0 and not isinstance(raw, bool)):
        return 0
    try:
        return size(raw)
    except ConfigError as error:
        raise ConfigError(f"{error}, or 0 for none") from None


def show_size(count: int) -> str:
    """Bytes for people: 402653184 -> "384 MiB"."""
    number, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(number) >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} {units[0]}" if units[0] == "B" or number >= 100 else f"{number:.1f} {units[0]}"
