"""What items' fields may be, for the readers of all kinds. Pure."""

from __future__ import annotations

from collections.abc import Callable

from agentserve.server.errors import ApiError
from agentserve.server.text_port import JsonObject

NewId = Callable[[str], str]
"""A fresh id with a prefix: msg, fc, fco, rs, mcp."""

MOST_ID_CHARS = 256


def own_id(item: JsonObject, place: str, prefix: str, new_id: NewId) -> str:
    return new_id(prefix) if item.get("id") is None else name(item, "id", place)


def status(item: JsonObject) -> str:
    return "incomplete" if item.get("status") == "incomplete" else "completed"


def name(item: JsonObject, key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not 1 <= len(value) <= MOST_ID_CHARS:
        raise broken(f"{place}.{key}", f"must be a string of 1 to {MOST_ID_CHARS} characters")
    return value


def text(item: JsonObject, key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise broken(f"{place}.{key}", "must be a string")
    return value


def broken(param: str, problem: str, code: str = "invalid_value") -> ApiError:
    return ApiError(f"{param}: {problem}", param=param, code=code)
