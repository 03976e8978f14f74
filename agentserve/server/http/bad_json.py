"""Bodies that are almost JSON: what a client's own encoder let through is named by its field.

Python's encoder writes lone surrogates and NaN without a word, so these come from honest clients, deep
in a message. A strict decoder says at which byte they stand; people look for fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from agentserve.server.errors import ApiError

_NO_NUMBER = object()


def unreadable(body: bytes, error: Exception) -> ApiError:
    """The refusal of a body that a strict decoder did not take. Its depth has been checked."""
    try:
        value = json.loads(body, parse_constant=lambda name: _NO_NUMBER)
    except (ValueError, RecursionError):
        return ApiError(f"The body is not valid JSON: {error}", code="invalid_json")
    for path, problem in _problems(value, ""):
        where = f"{path}: " if path else "The body: "
        return ApiError(f"{where}{problem}", param=path or None, code="invalid_json")
    return ApiError(f"The body is not valid JSON: {error}", code="invalid_json")


def _problems(value: object, path: str) -> Iterator[tuple[str, str]]:
    """(path, what is wrong there), in the order of the body. Paths are made for what is wrong alone: a
    body may have a million numbers."""
    problem = _problem(value)
    if problem:
        yield path, problem
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, list | dict) or _problem(item):
                yield from _problems(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            if _problem(name):
                yield path, "has a field whose name has half of a surrogate pair, which no text has"
            elif isinstance(item, list | dict) or _problem(item):
                shown = name if len(name) <= 64 else name[:64] + "..."
                yield from _problems(item, f"{path}.{shown}" if path else shown)


def _problem(value: object) -> str:
    """Of a value that has no parts."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "has half of a surrogate pair, which no text has"
    return "NaN and Infinity are not JSON" if value is _NO_NUMBER else ""
