"""Any Messages body gets an answer or a 4xx in Anthropic's shape, never a fault; nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.server.http.anthropic.schemas import Block, CountRequest, MessagesRequest
from tests.anthropic_client import frames, put_together
from tests.api_rig import Rig, hermes, user
from tests.fakes import ScriptedEngine, say
from tests.unit.test_server_fuzz import json_values

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
FIELDS = {MESSAGES: MessagesRequest.__struct_fields__, COUNT: CountRequest.__struct_fields__}
KINDS = ["auto", "any", "tool", "none", "enabled", "disabled", "json_schema", "create", "continue", "text"]
LIKELY = st.sampled_from(
    [0, 1, -1, 2**63, "", "x", True, [], {}, [1], ["a"], [{"name": "f", "input_schema": {}}], [{"name": "f"}]]
) | st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "name": st.just("f"),
        "schema": st.just({"type": "object"}),
        "previous_message_id": st.sampled_from(["", "msg_1_x", "msg__", "x"]),
        "display": st.just("omitted"),
    },
)
TEXT = {"type": "text", "text": "y"}
BLOCKS = st.sampled_from(
    [
        TEXT,
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
        {"type": "tool_use", "id": "c2", "name": "f"},
        {"type": "tool_use", "id": "c2", "name": "f", "input": [1]},
        {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT]},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
        {"type": "thinking", "thinking": "h", "signature": "as1h.aA=="},
        {"type": "thinking", "thinking": "", "signature": "as1h.aA=="},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "w", "input": {}},
        {"type": "image", "source": {}},
        {"type": "document", "source": {"type": "text", "data": "d"}},
    ]
) | st.dictionaries(st.sampled_from(Block.__struct_fields__), json_values, max_size=4)
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.just("x") | st.just("") | st.lists(BLOCKS, max_size=3),
        }
    ),
    max_size=6,
)


@pytest.mark.parametrize("path", list(FIELDS))
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_field_with_any_value(path: str, data: st.DataObject) -> None:
    changed = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), json_values | LIKELY, max_size=4))
    asyncio.run(_check(path, {"model": "tiny", "max_tokens": 9, "messages": [user("a")]} | changed))


@settings(max_examples=150, deadline=None)
@given(TURNS, st.booleans())
def test_any_order_of_turns(turns: list[Any], stream: bool) -> None:
    asyncio.run(_check(MESSAGES, {"model": "tiny", "max_tokens": 99, "messages": turns, "stream": stream}))


async def _check(path: str, body: Any) -> None:
    rig = Rig(ScriptedEngine(say("Hm. " + hermes("f", '{"a": 1}'))))
    reply = await rig.post(path, body)
    told: Any = None
    if reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"):
        told = put_together(frames(reply.content))
    else:
        told = reply.json()
    if reply.status_code == 200:
        assert set(told) == {"input_tokens"} if path == COUNT else told["stop_reason"]
    else:
        assert reply.status_code in (400, 404, 413), (body, reply.text)
        assert set(told) == {"type", "error", "request_id"}
        assert "\n" not in told["error"]["message"]
    assert not rig.engine.live
    rig.check_rest()
