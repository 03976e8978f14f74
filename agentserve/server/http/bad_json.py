"""Bodies that are almost JSON: what a client's own encoder let through is named by its field.

Python's encoder writes lone surrogates and NaN without a word, so these come from honest clients, deep
in a message. A strict decoder says at which byte they stand; people look for fields. Of numbers that it
cannot hold it says where they are only as far as its types have names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

from agentserve.server.errors import ApiError

_NO_NUMBER, _NO_SUCH_NUMBER = object(), object()
_MOST_DIGITS = 4300  # of a whole number that the decoder, and Python, take
_MOST_BITS = 1024  # of a whole number that a double holds
_OUT_OF_RANGE = "the number is out of range"

Problem = Callable[[object], str]
"""What is wrong with a value that has no parts; empty: nothing."""


def unreadable(body: bytes, error: Exception) -> ApiError:
    """The refusal of a body that a strict decoder did not take. Its depth has been checked."""
    try:
        value = json.loads(body, parse_constant=lambda name: _NO_NUMBER, parse_float=_float, parse_int=_whole)
    except (ValueError, RecursionError):
        return ApiError(f"The body is not valid JSON: {error}", code="invalid_json")
    for path, problem in _problems(value, "", _unreadable):
        return _named(path, problem)
    return ApiError(f"The body is not valid JSON: {error}", code="invalid_json")


def check_numbers(value: object) -> None:
    """Refuse whole numbers that no double holds, as such fractions are, by their field's name."""
    for path, problem in _problems(value, "", _too_large):
        raise _named(path, problem)


def _named(path: str, problem: str) -> ApiError:
    code = "invalid_value" if problem is _OUT_OF_RANGE else "invalid_json"
    return ApiError(f"{path or 'The body'}: {problem}", param=path or None, code=code)


def _problems(value: object, path: str, problem_of: Problem) -> Iterator[tuple[str, str]]:
    """(path, what is wrong there), in the order of the body. Paths are made for what is wrong alone: a
    body may have a million numbers."""
    problem = problem_of(value)
    if problem:
        yield path, problem
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, list | dict) or problem_of(item):
                yield from _problems(item, f"{path}[{index}]", problem_of)
    elif isinstance(value, dict):
        for name, item in value.items():
            if problem_of(name):
                yield path, "has a field whose name has half of a surrogate pair, which no text has"
            elif isinstance(item, list | dict) or problem_of(item):
                shown = name if len(name) <= 64 else name[:64] + "..."
                yield from _problems(item, f"{path}.{shown}" if path else shown, problem_of)


def _float(text: str) -> object:
    number = float(text)
    return number if math.isfinite(number) else _NO_SUCH_NUMBER


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
    if value is _NO_SUCH_NUMBER:
        return _OUT_OF_RANGE
    return "NaN and Infinity are not JSON" if value is _NO_NUMBER else ""
