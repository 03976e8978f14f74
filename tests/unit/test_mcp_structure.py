"""What there is in JSON, before it is parsed; and replies that have too much of it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tools_bridge.mcp.structure import OBJECT, Structure

values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('\\"{[,}]x\n\u2028é'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def weight(value: Any) -> int:
    if isinstance(value, dict):
        return OBJECT + max(0, len(value) - 1) + sum(map(weight, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(weight, value))
    return 0


@given(values, st.integers(1, 7), st.booleans())
def test_it_is_that_of_the_value_however_it_is_cut(value: Any, size: int, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    structure = Structure()
    assert sum(structure.cost(data[at : at + size]) for at in range(0, len(data), size)) == weight(value)


def test_what_is_no_json_hides_nothing() -> None:
    for odd in (b': a "comment\n', b'id: "\\\r', b'data: "\\\n'):
        structure = Structure()
        structure.cost(odd)
        assert structure.cost(b"data: [{},{}]\n") == 2 * OBJECT + 3
