"""Requests and answers of the Responses API, on the application with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.api_rig import Rig, hermes
from tests.fakes import Script, say

RESPONSES = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = hermes("weather", '{"city": "Oslo"}')
ENDS = ("response.completed", "response.incomplete", "response.failed")


def parsed(content: bytes) -> list[Any]:
    """The events of a stream, each checked; the last is "[DONE]" where it came."""
    found: list[Any] = []
    for block in content.split(b"\n\n"):
        if not block or block.startswith(b":"):
            continue
        if block == b"data: [DONE]":
            found.append("[DONE]")
            continue
        kind, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert kind == b"event: " + event["type"].encode()
        found.append(event)
    return found


def checked(events: list[Any], first: int = 0) -> dict[str, Any]:
    """A whole stream is in order; gives the response of its last event."""
    *events, done = events
    assert done == "[DONE]"
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    assert [event["type"] for event in events if event["type"] in ENDS] == [events[-1]["type"]]
    check_items(events)
    final: dict[str, Any] = events[-1]["response"]
    return final


def check_items(events: list[Any]) -> None:
    """Items open and close one after the other, and what their deltas say is what they are."""
    output: list[Any] = []
    texts = ""
    open_item: Any = None
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            assert event["output_index"] == len(output)
            open_item, texts = event["item"], ""
        elif kind in ("output_text.delta", "function_call_arguments.delta", "reasoning_text.delta"):
            assert (event["item_id"], event["output_index"]) == (open_item["id"], len(output))
            assert event["delta"]
            texts += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts
        elif kind == "content_part.done":
            assert event["part"]["text"] == texts
        elif kind == "output_item.done":
            item = event["item"]
            assert item["id"] == open_item["id"]
            shown = item["arguments"] if "arguments" in item else "".join(p["text"] for p in item["content"])
            assert shown == texts
            output.append(item)
            open_item = None
    if events[-1]["type"] != "response.failed" and events[-1]["response"]["status"] != "cancelled":
        assert open_item is None
        assert events[-1]["response"]["output"] == output


class Call:
    """One request as the HTTP server makes it, by a client that may leave."""

    def __init__(self, rig: Rig, method: str, path: str, body: Any = None, query: str = "") -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        self._body: bytes | None = b"" if body is None else json.dumps(body).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "state": {}}
        self.task = asyncio.create_task(
            rig.app({**scope, "query_string": query.encode(), "headers": headers}, self._receive, self.send)
        )

    async def _receive(self) -> Any:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"] if self.sent else 0

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def events(self) -> list[Any]:
        return parsed(self.content)


class Client:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def create(self, given: Any, *, says: str | Script | None = None, **fields: Any) -> Any:
        if says is not None:
            self.rig.engine.reply = say(says) if isinstance(says, str) else says
        reply = await self.rig.post(RESPONSES, {"model": "tiny", "input": given, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def stream(self, given: Any, *, says: str | Script | None = None, **fields: Any) -> list[Any]:
        if says is not None:
            self.rig.engine.reply = say(says) if isinstance(says, str) else says
        body = {"model": "tiny", "input": given, "stream": True, **fields}
        reply = await self.rig.post(RESPONSES, body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return parsed(reply.content)

    async def refused(self, given: Any, status: int = 400, **fields: Any) -> Any:
        reply = await self.rig.post(RESPONSES, {"model": "tiny", "input": given, **fields})
        assert reply.status_code == status, reply.text
        return reply.json()["error"]

    async def get(self, path: str, status: int = 200) -> Any:
        reply = await self.rig.client.get(path)
        assert reply.status_code == status, reply.text
        return reply.json()


def call_of(response: Any) -> Any:
    return next(item for item in response["output"] if item["type"] == "function_call")


def result(call: Any, output: Any = "rain") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def text_of(response: Any) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )
