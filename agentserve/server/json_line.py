"""JSON on one line, as streams and event logs carry it."""

from __future__ import annotations

import json
import math

import msgspec

_escaping = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
_plain = msgspec.json.Encoder().encode
_LONG = 64 << 10  # bytes
_BREAKS = ("\u0085", "\u2028", "\u2029")  # lines end here for some readers; others are escaped in any JSON


def dump_json(value: object) -> bytes:
    """One line of JSON. Non-ASCII is escaped, so that no reader finds a line break (U+2028) in it, or half a
    character in what it has read so far; of long lines only line breaks are, as to escape some megabytes
    stops everybody for a tenth of a second. Numbers that JSON has none for are null."""
    try:
        line = _plain(value)  # several times as fast, and nearly always all that is needed
        if line.isascii():
            return line
        if len(line) > _LONG:
            for each in _BREAKS:
                line = line.replace(each.encode(), b"\\u%04x" % ord(each))
            return line
    except UnicodeEncodeError:  # half a surrogate pair
        pass
    try:
        return _escaping(value).encode()
    except ValueError:  # NaN or an infinity, which the other encoder takes for null
        return _escaping(_finite(value)).encode()


def dump_whole(value: object) -> bytes:
    """The same for a reply that is one value: no reader looks for lines in it, so what is not ASCII stays as
    it is. To escape some megabytes takes ten times as long as all the rest."""
    try:
        return _plain(value)
    except UnicodeEncodeError:  # half a surrogate pair
        return dump_json(value)


def _finite(value: object) -> object:
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value
