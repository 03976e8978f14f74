"""Agents' sessions on the application with a scripted engine, and what must hold of their events."""

from __future__ import annotations

import json
from typing import Any

from agentserve.messages import unpack_tokens
from tests.api_rig import Rig, hermes, settled
from tests.fakes import Script, say

SESSIONS = "/v1/agents/sessions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW: dict[str, Any] = {"type": "function", "name": "now", "description": "", "parameters": {"type": "object"}}
CALL = hermes("weather", '{"city": "Oslo"}')
TWO = CALL + hermes("now", "{}")
ENDS = ("completed", "failed", "cancelled")


class Agent:
    """One session, and a reader of its events."""

    def __init__(self, rig: Rig, session: dict[str, Any]) -> None:
        self.rig = rig
        self.id: str = session["id"]
        self.path = f"{SESSIONS}/{self.id}"
        self._after = f"{self.log.name}-0"

    @property
    def history(self) -> Any:
        return self.rig.context.agents.shelf.get("default", self.id)

    @property
    def log(self) -> Any:
        return self.rig.context.telling.log_of(self.history)

    def events(self) -> list[dict[str, Any]]:
        """All that were told so far."""
        found, number = [], 0
        while (event := self.log.since(number)[1]) is not None:
            number = event.number
            data = json.loads(event.data)
            assert data["type"] == event.kind
            assert data["event_id"] == f"{self.log.name}-{number}"
            found.append(data)
        return found

    def kinds(self) -> list[str]:
        return [event["type"].removeprefix("agent.session.") for event in self.events()]

    async def get(self, path: str = "", status: int = 200) -> Any:
        reply = await self.rig.client.get(self.path + path)
        assert reply.status_code == status, reply.text
        return reply.json()

    async def send(
        self, *events: dict[str, Any], headers: dict[str, str] | None = None, status: int = 202
    ) -> Any:
        reply = await self.rig.post(f"{self.path}/events", {"events": list(events)}, headers)
        assert reply.status_code == status, reply.text
        return reply.json()["error"] if reply.content else None

    async def say(self, text: str, *, says: Script | str | None = None, **more: Any) -> Any:
        if says is not None:
            self.rig.engine.reply = say(says) if isinstance(says, str) else says
        return await self.send(message(text), **more)

    async def give(self, call: dict[str, Any], output: Any = "rain", **more: Any) -> Any:
        return await self.send(result(call, output), **more)

    async def until(self, status: str) -> dict[str, Any]:
        await settled(lambda: self.history is None or self.history.status == status)
        shown: dict[str, Any] = await self.get()
        return shown

    async def items(self, query: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.get(f"/items?order=asc&limit=100{query}"))["data"]
        return found

    def prompt(self, index: int = -1) -> str:
        return bytes(t for t in unpack_tokens(self.rig.engine.submits[index].tokens) if t < 256).decode()


async def created(rig: Rig, says: Script | str | None = None, **fields: Any) -> Agent:
    if says is not None:
        rig.engine.reply = say(says) if isinstance(says, str) else says
    reply = await rig.post(SESSIONS, body(**fields))
    assert reply.status_code == 200, reply.text
    return Agent(rig, reply.json())


def body(agent: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    made = {"model": "tiny", "instructions": "Be brief.", "tools": [WEATHER, NOW], **(agent or {})}
    return {"environment": {"type": "none"}, "agent": made, **fields}


def message(text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "agent.session.input.message", "input": [{"role": "user", "content": content}]}


def result(call: dict[str, Any], output: Any = "rain", **more: Any) -> dict[str, Any]:
    return {
        "type": "agent.session.input.tool_result",
        "turn_id": call["turn_id"],
        "call_id": call["call_id"],
        "success": True,
        "output": output,
        **more,
    }


CANCEL = {"type": "agent.session.input.cancel"}


def check_events(events: list[dict[str, Any]]) -> None:
    """Turns come one after the other, each to one end and then idle; items open, grow and close once, and
    what their deltas say is what they are."""
    assert len({event["event_id"] for event in events}) == len(events)
    turn: str | None = None
    ended = False
    open_items: dict[str, str] = {}
    closed: set[str] = set()
    index = 0
    for event in events:
        kind = event["type"].removeprefix("agent.session.")
        if kind == "turn.created":
            assert turn is None, "a turn within a turn"
            turn, ended, index = event["turn_id"], False, 0
        elif kind.startswith("turn."):
            if turn is None:  # the result of a background call
                assert kind in ("turn.item.added", "turn.item.done"), kind
                continue
            assert event["turn_id"] == turn or kind.startswith("turn.item"), kind
        if kind == "idle":
            assert ended, "idle without an end"
            assert event["session"]["required_actions"] == []
            turn = None
        elif kind.removeprefix("turn.") in ENDS:
            assert not ended
            assert not open_items
            ended = True
            assert event["turn"]["status"] == kind.removeprefix("turn.")
        elif kind == "turn.item.added":
            item = event["item"]
            if "output_index" in event:
                assert event["output_index"] == index
                index += 1
                if item["type"] != "function_call":
                    open_items[item["id"]] = ""
        elif kind in ("turn.output_text.delta", "turn.reasoning_summary_text.delta"):
            assert event["delta"]
            open_items[event["item_id"]] += event["delta"]
        elif kind in ("turn.output_text.done", "turn.reasoning_summary_text.done"):
            assert event["text"] == open_items[event["item_id"]]
        elif kind == "turn.item.done":
            item = event["item"]
            assert item["id"] not in closed
            closed.add(item["id"])
            if item["type"] != "function_call":
                parts = item["content"] if item["type"] == "message" else item["summary"]
                assert "".join(part["text"] for part in parts) == open_items.pop(item["id"])
