"""What a strict client of Messages streams puts together, and what it insists on."""

from __future__ import annotations

import json
from typing import Any

_OF_BLOCK = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def frames(body: bytes) -> list[Any]:
    """The events of a stream; each is named by its type and has one line of data."""
    events: list[Any] = []
    for block in body.split(b"\n\n")[:-1]:
        name, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    assert body.endswith(b"\n\n")
    return events


def put_together(events: list[Any]) -> Any:
    """The message; a stream out of order fails. A call's input is the text it came as, in `partial`."""
    events = [event for event in events if event["type"] != "ping"]
    first, *rest = events
    assert first["type"] == "message_start"
    message = json.loads(json.dumps(first["message"]))
    assert message["content"] == []
    assert message["stop_reason"] is None
    block: Any = None
    for event in rest[:-2]:
        index = event["index"]
        match event["type"]:
            case "content_block_start":
                assert block is None
                assert index == len(message["content"])
                block = dict(event["content_block"])
                assert block.pop("input", {}) == {}
                message["content"].append(block)
                seen: list[str] = []
            case "content_block_delta":
                assert block is not None
                assert index == len(message["content"]) - 1
                kind = event["delta"]["type"]
                assert kind in _OF_BLOCK[block["type"]]
                assert "signature_delta" not in seen
                seen.append(kind)
                [(name, piece)] = [(k, v) for k, v in event["delta"].items() if k != "type"]
                assert piece
                name = {"partial_json": "partial"}.get(name, name)
                block[name] = block.get(name, "") + piece
            case "content_block_stop":
                assert index == len(message["content"]) - 1
                assert (block["type"] == "thinking") == ("signature_delta" in seen)
                block = None
            case other:
                raise AssertionError(other)
    assert block is None
    ending, stop = rest[-2:]
    assert (ending["type"], stop) == ("message_delta", {"type": "message_stop"})
    assert ending["delta"]["stop_reason"]
    message |= ending["delta"]
    message["usage"] |= ending["usage"]
    return message
