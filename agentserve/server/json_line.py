"""JSON on one line, as streams and event logs carry it."""

from __future__ import annotations

import json

import msgspec

_escaping = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
_plain = msgspec.json.Encoder().encode


def dump_json(value: object) -> bytes:
    """One line of JSON. Non-ASCII is escaped, so that no reader finds a line break (U+2028) in it."""
    try:
        line = _plain(value)  # several times as fast, and nearly always all that is needed
    except UnicodeEncodeError:  # half a surrogate pair
        return _escaping(value).encode()
    return line if line.isascii() else _escaping(value).encode()
