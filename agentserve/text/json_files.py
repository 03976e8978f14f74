"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agentserve.text.errors import TextError

JsonObject = dict[str, object]


def read_object(path: Path) -> JsonObject:
    """The JSON object in `path`; {} where the file does not exist, TextError where it is broken."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path.name}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TextError(f"{path.name}: a JSON object is expected")
    return value


def as_object(value: object, where: str) -> JsonObject:
    """`value` as a JSON object; TextError naming `where` otherwise."""
    if not isinstance(value, dict):
        raise TextError(f"{where}: a JSON object is expected")
    return value


def objects(value: object, where: str) -> list[JsonObject]:
    """`value` as a list of JSON objects, None as the empty list."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise TextError(f"{where}: a list is expected")
    return [as_object(item, where) for item in value]


def token_text(config: Mapping[str, object], name: str) -> str | None:
    """A named token of `tokenizer_config.json`: a string, or an object with `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
