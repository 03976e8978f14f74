"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agentserve.text.errors import TextError

JsonObject = dict[str, object]

MAX_JSON = 256 << 20  # bytes; the largest tokenizer.json in use has some 35 MB


def read_text(path: Path, most: int) -> str:
    """The UTF-8 text in `path`, of at most `most` bytes: a path may name a device without an end.

    Raises OSError, TextError where it is longer, UnicodeDecodeError.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise TextError(f"{path}: larger than {most >> 20} MiB")
    return content.decode("utf-8")


def read_object(path: Path) -> JsonObject:
    """The JSON object in `path`; {} where the file does not exist, TextError where it is broken."""
    try:
        value = json.loads(read_text(path, MAX_JSON))
    except FileNotFoundError:
        return {}
    except TextError:
        raise
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
