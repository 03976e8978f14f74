"""From items to chat messages: what was said in one turn is one message again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.server.errors import ApiError
from agentserve.server.http.responses.asked import messages_of
from agentserve.server.http.responses.items import Reference, read_input
from agentserve.server.http.responses.job import shortened
from agentserve.server.http.responses.thoughts import packed, unpacked
from agentserve.server.http.responses.tools import MOST_NAME_CHARS, flat_name, read_tools

Item = dict[str, Any]


def ids() -> Any:
    numbers: Iterator[int] = iter(range(10**6))
    return lambda prefix: f"{prefix}_{next(numbers)}"


def said(*items: Item) -> list[Item]:
    return [item for item in read_input(items, ids(), most=1000).items if isinstance(item, dict)]


def messages(*runs: list[Item]) -> list[Item]:
    return messages_of([said(*run) for run in runs])[0]


def assistant(text: str) -> Item:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(id_: str, **more: Any) -> Item:
    return {"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}", **more}


def output(id_: str, text: Any = "r") -> Item:
    return {"type": "function_call_output", "call_id": id_, "output": text}


def thought(text: str) -> Item:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


USER: Item = {"role": "user", "content": "hi"}


def test_one_turn_is_one_message() -> None:
    [_, reply, first, second] = messages(
        [USER, thought("hm"), assistant("a"), call("1"), call("2"), output("2"), output("1")]
    )
    assert (reply["role"], reply["content"], reply["reasoning_content"]) == ("assistant", "a", "hm")
    assert [made["id"] for made in reply["tool_calls"]] == ["1", "2"]
    assert [first["tool_call_id"], second["tool_call_id"]] == ["2", "1"]


def test_what_follows_a_call_goes_with_it() -> None:
    [reply, _] = messages([assistant("a"), call("1"), assistant(" b"), call("2"), output("1")])
    assert reply["content"] == "a b"
    assert len(reply["tool_calls"]) == 2


def test_two_answers_stay_two() -> None:
    assert [m["content"] for m in messages([assistant("a"), assistant("b")])] == ["a", "b"]
    assert [m["content"] for m in messages([assistant("a"), thought("hm"), assistant("b")])] == ["a", "b"]
    assert [m["content"] for m in messages([assistant("a")], [assistant("b")])] == ["a", "b"]


def test_places_are_those_of_the_first_items() -> None:
    runs = [said(USER, thought("x"), assistant("a")), said(call("1")), said(output("1"), USER)]
    assert messages_of(runs)[1] == [0, 1, 3, 4, 5]


def test_calls_that_were_cut_stay_with_their_results() -> None:
    broken = call("1", arguments='{"ci', status="incomplete")
    said, result, _ = messages([assistant("a"), broken, output("1"), USER])
    assert said["tool_calls"][0]["function"]["arguments"] == '{"ci'
    assert result["role"] == "tool"


def test_contents() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    [two, result, refusal] = messages(
        [
            {"role": "developer", "content": parts},
            output("1", parts),
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ]
    )
    assert two["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert result["content"] == two["content"]
    assert refusal["content"] == "no"


def test_reasoning_comes_back_in_either_form_and_others_do_not() -> None:
    ours = {"type": "reasoning", "summary": [], "encrypted_content": packed("so")}
    theirs = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    assert messages([ours, assistant("a")])[0]["reasoning_content"] == "so"
    for other in (theirs, summary):
        assert messages([other, assistant("a")]) == [{"role": "assistant", "content": "a"}]


@given(st.text())
def test_packed_reasoning_is_the_same_unpacked(text: str) -> None:
    assert unpacked(packed(text)) == text


@pytest.mark.parametrize("broken", ["", "as1.", "as1.####", packed("x")[:-4], "as1.AAAA"])
def test_what_is_not_ours_says_nothing(broken: str) -> None:
    assert unpacked(broken) is None


def test_a_reference_may_have_no_type() -> None:
    found = read_input([{"id": "msg_1"}, {"type": "item_reference", "id": "msg_2"}], ids(), most=9)
    assert found.items == (Reference("msg_1"), Reference("msg_2"))
    assert found.places == ("input[0]", "input[1]")


def test_bounds() -> None:
    with pytest.raises(ApiError, match="at most 2"):
        read_input([USER] * 3, ids(), most=2)


Read = TypeVar("Read")


def read_or_refused(read: Callable[[], Read], place: str) -> Read | None:
    """None: it was refused, and the error says where."""
    try:
        return read()
    except ApiError as error:
        refusal = error
    assert (refusal.param or "").startswith(place)
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("type", "role", "content", "id", "call_id", "name", "namespace", "output", "arguments", "summary")
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference", "user")
ITEMS = st.lists(
    st.dictionaries(st.sampled_from(KEYS), JSON | st.sampled_from(KINDS) | st.just([{"text": "x"}]))
)


@given(ITEMS)
def test_any_items_are_read_or_refused(items: list[Item]) -> None:
    """Never anything but an ApiError that says where; and what was read is read again as it is."""
    found = read_or_refused(lambda: read_input(items, ids(), most=1000), "input[")
    if found is None:
        return
    read = [item for item in found.items if isinstance(item, dict)]
    assert list(read_input(read, ids(), most=1000).items) == read
    messages_of([read])


@given(st.lists(st.dictionaries(st.sampled_from((*KEYS, "parameters", "strict", "tools")), JSON)))
def test_any_tools_are_read_or_refused(tools: list[Item]) -> None:
    box = read_or_refused(lambda: read_tools(tools), "tools[")
    assert box is None or len(box.defs) == len(box.places)


@given(st.text(min_size=1, max_size=90), st.text(min_size=1, max_size=90), st.text(min_size=1, max_size=90))
def test_flat_names_are_names(space: str, one: str, other: str) -> None:
    flat = flat_name(space, one)
    assert 1 <= len(flat) <= MOST_NAME_CHARS
    assert flat.replace("_", "a").replace("-", "a").isalnum()
    assert flat.isascii()
    assert flat == flat_name(space, one)
    if len(space) + len(one) > MOST_NAME_CHARS and one != other and len(space) + len(other) > MOST_NAME_CHARS:
        assert flat != flat_name(space, other)


@given(st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=30), st.integers(0, 2))
def test_a_shortened_history_begins_with_a_user_and_ends_the_same(roles: list[str], systems: int) -> None:
    history: list[Item] = [{"role": "system", "content": "s"}] * systems
    history += [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    rounds = 0
    while (shorter := shortened(history)) is not None:
        assert shorter[:systems] == history[:systems]
        assert shorter[systems]["role"] == "user"
        assert shorter[systems:] == history[len(history) - len(shorter) + systems :]
        assert len(shorter) < len(history)
        history = shorter
        rounds += 1
    assert rounds <= 20
