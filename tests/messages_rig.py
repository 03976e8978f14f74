"""Requests and answers of the Messages API, on the application with a scripted engine."""

from __future__ import annotations

from typing import Any

from tests.anthropic_client import frames, put_together
from tests.api_rig import Rig, hermes, user

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "weather", "description": "Weather.", "input_schema": {"type": "object"}}
CALL = hermes("weather", '{"city": "Oslo"}')


async def ask(rig: Rig, *messages: Any, headers: Any = None, **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 100, "messages": messages or [user("hi")], **fields}
    reply = await rig.post(MESSAGES, body, headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    if fields.get("stream"):
        assert reply.headers["content-type"].startswith("text/event-stream")
        return put_together(frames(reply.content))
    return reply.json()


async def refusal(rig: Rig, body: Any, path: str = MESSAGES, headers: Any = None) -> tuple[int, str, str]:
    reply = await rig.post(path, body, headers)
    told = reply.json()
    assert set(told) == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return reply.status_code, told["error"]["type"], told["error"]["message"]


def minimal(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 9, "messages": [user("hi")], **fields}


def usage_before(message: Any) -> int:
    usage = message["usage"]
    total: int = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return total
