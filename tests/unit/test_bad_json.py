"""Numbers and texts that no JSON has are named by their field, and looked for no longer than need be."""

from __future__ import annotations

import json

import msgspec
import pytest

from agentserve.server.errors import ApiError
from agentserve.server.http import bad_json
from agentserve.server.http.bad_json import check_numbers, unreadable

LARGE = "9" * 309


def refused(body: str) -> str | None:
    return unreadable(body.encode(), ValueError("as the decoder said")).param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"a": [1, 2, {"b": 1e999}]}', "a[2].b"),
        ('{"a": [-1e999, "x"]}', "a[0]"),
        ('{"a": NaN}', "a"),
        ('{"a": {"b": ["\\ud800"]}}', "a.b[0]"),
        ('{"a": 1, "b": ' + "9" * 4301 + "}", "b"),
        ('{"a": [1, 2.5, null, true, "x"], "b": 1e999}', "b"),
        ('{"a": [1, 2.5, null, true, "x"]}', None),
        (f'{{"a": {LARGE}}}', None),  # which Python reads
    ],
)
def test_the_field_is_named(body: str, param: str | None) -> None:
    assert refused(body) == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (f'{{"a": {{"b": [1, {LARGE}]}}}}', "a.b[1]"),
        (f'{{"a": -1{LARGE}}}', "a"),
        (f'{{"a": "{LARGE}", "b": 1.5}}', None),
        (f'{{"a": {"9" * 307}}}', None),
        (f'{{"a": {2**1023}}}', None),
        (f'{{"a": {2**1024}}}', "a"),
        ('{"a": [1, 2]}', None),
    ],
)
def test_whole_numbers_that_no_double_holds(body: str, param: str | None) -> None:
    value = json.loads(body)
    if param is None:
        check_numbers(value, body.encode())
        return
    with pytest.raises(ApiError) as error:
        check_numbers(value, body.encode())
    assert error.value.param == param


def test_nothing_is_called_for_each_of_a_million_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real = bad_json._unreadable

    def counted(value: object) -> str:
        asked.append(value)
        return real(value)

    monkeypatch.setattr(bad_json, "_UNREADABLE", bad_json.Search(counted, bad_json._UNREADABLE.harmless))
    numbers = ",".join("7" for _ in range(1000))
    assert refused(f'{{"a": [{numbers}], "b": 1e999}}') == "b"
    assert len(asked) < 20
    check_numbers(msgspec.Raw(b"never looked at"), b'{"a": 1}')
