"""Any body gets an answer or a 4xx, never a fault, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.server.http.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.api_rig import CHAT, TOOLS, Rig, user

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
likely = st.sampled_from(
    [
        0,
        1,
        -1,
        2**31,
        2**63,
        "",
        "x",
        "auto",
        "required",
        True,
        [],
        {},
        [1],
        ["a"],
        [[1]],
        TOOLS,
        {"type": "function"},
    ]
)
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [user("a")]},
    "/v1/completions": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
FIELDS = {
    CHAT: ChatRequest.__struct_fields__,
    "/v1/completions": CompletionRequest.__struct_fields__,
    "/tokenize": TokenizeRequest.__struct_fields__,
    "/detokenize": DetokenizeRequest.__struct_fields__,
}


@pytest.mark.parametrize("path", list(VALID))
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_field_with_any_value(path: str, data: st.DataObject) -> None:
    changed = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), json_values | likely, max_size=4))
    body = json.dumps(VALID[path] | changed)
    asyncio.run(_check(path, body))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
            optional={
                "content": st.sampled_from([None, "", "x", [{"type": "text", "text": "y"}], []]),
                "tool_call_id": st.sampled_from([None, "c1", "c2"]),
                "tool_calls": st.sampled_from(
                    [
                        None,
                        [],
                        [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}],
                        [{"id": c, "function": {"name": "f", "arguments": {}}} for c in ("c1", "c2")],
                    ]
                ),
            },
        ),
        max_size=6,
    )
)
def test_any_order_of_messages(messages: list[dict[str, Any]]) -> None:
    asyncio.run(_check(CHAT, json.dumps({"messages": messages, "max_tokens": 2})))


async def _check(path: str, body: str) -> None:
    rig = Rig()
    reply = await rig.post(path, body)
    assert reply.status_code in (200, 400, 404, 413), (body, reply.text)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
    assert not rig.engine.live
    if path == CHAT:
        rig.check_rest()
