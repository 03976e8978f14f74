"""JSON on one line: the same for all that a client or a model can say."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from agentserve.server.json_line import dump_json, dump_whole


@pytest.mark.parametrize("text", ["plain", "caf\u00e9", "a\u2028b", "half \ud83d"])
@pytest.mark.parametrize("number", [1.5, math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_null(text: str, number: float) -> None:
    value: Any = {"text": text, "deep": [{"numbers": (number, 2)}]}
    line = dump_json(value)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    shown = number if math.isfinite(number) else None
    assert json.loads(line) == {"text": text, "deep": [{"numbers": [shown, 2]}]}


def test_what_contains_itself_is_an_error() -> None:
    value: list[Any] = ["\u00e9"]
    value.append(value)
    with pytest.raises((ValueError, RecursionError)):
        dump_json(value)


@pytest.mark.parametrize("text", ["plain", "caf\u00e9", "a\u2028b", "half \ud83d"])
def test_a_whole_reply_says_the_same(text: str) -> None:
    value = {"a": [text, float("nan")], text: 1}
    assert json.loads(dump_whole(value)) == {"a": [text, None], text: 1}
    assert json.loads(dump_json(value)) == {"a": [text, None], text: 1}


def test_a_long_line_stays_one_without_being_escaped_whole() -> None:
    value = {"text": "caf\u00e9 \u2028\u2029\u0085\n\x1c\x0b\\u2028" * 5000}
    line = dump_json(value)
    assert "\u00e9".encode() in line
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == value
