"""Equal histories have equal digests; different ones do not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentserve.text import TextError
from agentserve.text.canonical import ROOT, chain, message_key


def call(name: str, arguments: object, call_id: str = "call_1") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict[str, object], content: object = None) -> dict[str, object]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


EQUAL = [
    ({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}),
    ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "bob"}),
    (assistant(call("f", "{}")), assistant(call("f", {}, "other"), content="")),
    (assistant(call("f", "")), assistant(call("f", None), content=[])),
    (assistant(call("f", '{"a":1,"b":[true]}')), assistant(call("f", '{ "b": [ true ],\n"a": 1.0 }'))),
    (assistant(content="x"), {"role": "assistant", "content": "x", "reasoning_content": "hm"}),
]
DIFFERENT = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": "a "},
    {"role": "system", "content": "a"},
    {"role": "developer", "content": "a"},
    {"role": "assistant", "content": "a"},
    {"role": "tool", "content": "a", "tool_call_id": "1"},
    {"role": "tool", "content": "a", "tool_call_id": "2"},
    {"role": "tool", "content": "", "tool_call_id": "a1"},
    {"role": "user", "content": "atool1"},
    assistant(),
    assistant(call("f", "{}")),
    assistant(call("f", "{}"), call("f", "{}")),
    assistant(call("f", '{"a": 1}')),
    assistant(call("f", '{"a": true}')),
    assistant(call("f", '{"a": "1"}')),
    assistant(call("f", '{"a": [1]}')),
    assistant(call("f", '{"a": [[1]]}')),
    assistant(call("f", '{"a": [1, 2]}')),
    assistant(call("f", '{"a": {"b": null}}')),
    assistant(call("f", '{"a": null, "b": null}')),
    assistant(call("f", "{}"), call("g", "{}")),
    assistant(call("g", "{}"), call("f", "{}")),
    assistant(call("fg", "{}")),
    assistant(call("f", "{}"), content="a"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_the_same_message_written_differently(one: dict[str, object], other: dict[str, object]) -> None:
    assert message_key(one) == message_key(other)


def test_different_messages_differ() -> None:
    keys = [message_key(message) for message in DIFFERENT]
    assert len(set(keys)) == len(keys)


def test_chain_depends_on_every_message_and_their_order() -> None:
    ends = set()
    for order in itertools.permutations(DIFFERENT[:4]):
        digest = ROOT
        for message in order:
            digest = chain(digest, message)
        ends.add(digest)
    assert len(ends) == 24


def test_digests_are_stable_across_processes() -> None:
    """Stored sessions are found again after a restart: these bytes must never change."""
    key = message_key(assistant(call("f", '{"b": [1.5, null, "é"], "a": -3}'), content="x"))
    assert key.hex() == "d6c5f35c3a8582973d4659648ce9c6bd434b1f471df25c8714e8a256307437ac"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=3), JSON, max_size=3)


def same(one: object, other: object) -> bool:
    """JSON equality: like Python's, but true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(OBJECTS, OBJECTS)
def test_arguments_equal_as_json_and_only_those(one: dict[str, object], other: dict[str, object]) -> None:
    keys = [message_key(assistant(call("f", value))) for value in (one, other)]
    assert (keys[0] == keys[1]) == same(one, other)


def test_a_parent_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        chain(b"short", DIFFERENT[0])


def test_a_broken_message_is_refused() -> None:
    with pytest.raises(TextError, match="unknown role"):
        message_key({"role": "robot", "content": "x"})
