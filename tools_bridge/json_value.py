"""What counts as JSON here, and as a call's arguments: decided once, for what models write and clients send.

A call that passed is rendered into prompts, digested and sent to clients without another check.
"""

from __future__ import annotations

import json
import math
from typing import Never

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_DEPTH = 64  # levels; templates and digests walk values recursively


class JsonError(ValueError):
    """Not what is meant by JSON; the message is one line without a place: the caller knows that."""


def parse_arguments(value: object, *, unique: bool = False) -> dict[str, Json]:
    """Call arguments as an object: JSON text, an object, or nothing (None, "", blanks, null: {}).

    `unique`: a key that comes twice in an object is an error; else its last value counts.
    """
    if isinstance(value, str):
        if not value.strip():
            return {}
        try:
            value = json.loads(
                value,
                parse_constant=no_constant,
                parse_float=_finite,
                object_pairs_hook=_once if unique else None,
            )
        except (ValueError, RecursionError):
            raise JsonError("arguments are not valid JSON") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise JsonError("arguments must be a JSON object")
    check_json(value)
    return value


def check_json(value: object) -> None:
    """JsonError unless `value` is finite JSON of at most MAX_DEPTH levels whose texts can be UTF-8."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        following: list[object] = []
        for item in level:
            if isinstance(item, dict):
                for key in item:
                    if not isinstance(key, str):
                        raise JsonError("object keys must be strings")
                    _check_text(key)
                following.extend(item.values())
            elif isinstance(item, list):
                following.extend(item)
            elif isinstance(item, str):
                _check_text(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise JsonError("numbers must be finite")
            elif not (item is None or isinstance(item, bool | int | float)):
                raise JsonError(f"{type(item).__name__} is not JSON")
        level = following
    if level:
        raise JsonError(f"nested deeper than {MAX_DEPTH} levels")


def is_text(value: str) -> bool:
    """Whether it can be sent: an escape may have made half of a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_text(value: str) -> None:
    if not is_text(value):
        raise JsonError("a text holds a lone surrogate, which no UTF-8 text can")


def no_constant(text: str) -> Never:
    """For `json.loads`: NaN and its like are no JSON."""
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key comes twice")
    return value
