"""Bodies that are almost JSON: what a client's own encoder let through is named by its field.

Python's encoder writes lone surrogates and NaN without a word, so these come from honest clients, deep
in a message. A strict decoder says at which byte they stand; people look for fields. Of numbers that it
cannot hold it says where they are only as far as its types have names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentserve.server.errors import ApiError

_NO_NUMBER, _NO_SUCH_NUMBER = object(), object()
_MOST_DIGITS = 4300  # of a whole number that the decoder, and Python, take
_MOST_BITS = 1024  # of a whole number that a double holds
_OUT_OF_RANGE = "the number is out of range"

_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS = b"0" * 308  # as many as a double's largest has, less one


@dataclass(frozen=True, slots=True)
class Search:
    """problem: what is wrong with a value that has no parts; empty: nothing. Those of `harmless` types need
    not be asked about."""

    problem: Callable[[object], str]
    harmless: frozenset[type]


def unreadable(body: bytes, error: Exception) -> ApiError:
    """The refusal of a body that a strict decoder did not take. Its depth has been checked."""
    try:
        # What is called for every number takes ten times as long as all the rest: only where one may need it.
        whole = _whole if _has_long_number(body) else None
        value = json.loads(body, parse_constant=lambda name: _NO_NUMBER, parse_int=whole)
    except (ValueError, RecursionError):
        return ApiError(f"The body is not valid JSON: {error}", code="invalid_json")
    for path, problem in _problems(value, "", _UNREADABLE):
        return _named(path, problem)
    return ApiError(f"The body is not valid JSON: {error}", code="invalid_json")


def check_numbers(value: object, body: bytes) -> None:
    """Refuse whole numbers that no double holds, as such fractions are, by their field's name. `value` is
    what `body` says."""
    if _has_long_number(body):
        for path, problem in _problems(value, "", _TOO_LARGE):
            raise _named(path, problem)


def _has_long_number(body: bytes) -> bool:
    """In C speed; what looks like one may be text."""
    return _TOO_MANY_DIGITS in body.translate(_ZEROS)


def _named(path: str, problem: str) -> ApiError:
    code = "invalid_value" if problem is _OUT_OF_RANGE else "invalid_json"
    return ApiError(f"{path or 'The body'}: {problem}", param=path or None, code=code)


def _problems(value: object, path: str, search: Search) -> Iterator[tuple[str, str]]:
    """(path, what is wrong there), in the order of the body. Paths are made for what is wrong alone: a
    body may have a million numbers."""
    problem_of = search.problem
    problem = problem_of(value)
    if problem:
        yield path, problem
    elif isinstance(value, list):
        if search.harmless.issuperset(map(type, value)):
            return
        for index, item in enumerate(value):
            if isinstance(item, _WITH_PARTS) or problem_of(item):
                yield from _problems(item, f"{path}[{index}]", search)
    elif isinstance(value, dict):
        for name, item in value.items():
            if problem_of(name):
                yield path, "has a field whose name has half of a surrogate pair, which no text has"
            elif isinstance(item, _WITH_PARTS) or problem_of(item):
                shown = name if len(name) <= 64 else name[:64] + "..."
                yield from _problems(item, f"{path}.{shown}" if path else shown, search)


_WITH_PARTS = (list, dict)


def _whole(text: str) -> object:
    return int(text) if len(text) <= _MOST_DIGITS else _NO_SUCH_NUMBER


def _too_large(value: object) -> str:
    return _OUT_OF_RANGE if isinstance(value, int) and value.bit_length() > _MOST_BITS else ""


def _unreadable(value: object) -> str:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "has half of a surrogate pair, which no text has"
    if value is _NO_SUCH_NUMBER or (isinstance(value, float) and math.isinf(value)):
        return _OUT_OF_RANGE
    return "NaN and Infinity are not JSON" if value is _NO_NUMBER else ""


_TOO_LARGE = Search(_too_large, frozenset({str, float, bool, type(None)}))
_UNREADABLE = Search(_unreadable, frozenset({int, bool, type(None)}))
