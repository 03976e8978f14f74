"""Messages bodies, and the chat requests that they become."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic.asked import Asked, asked
from agentserve.server.http.anthropic.schemas import MessagesRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "weather", "description": "Weather.", "input_schema": {"type": "object"}}
NONCE = "x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch=a1b2c;"


def ask(*messages: Any, **fields: Any) -> Asked:
    body = {"model": "tiny", "max_tokens": 9, "messages": messages or (USER,), **fields}
    return asked(msgspec.json.decode(json.dumps(body), type=MessagesRequest))


def chat_of(*messages: Any, **fields: Any) -> list[Any]:
    return ask(*messages, **fields).chat.messages


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(name: str, id_: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def result(id_: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "tool_result",
        "tool_use_id": id_,
        **({} if content is None else {"content": content}),
        **more,
    }


def refused(*messages: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        ask(*messages, **fields)
    assert error.value.status == 400
    return error.value
