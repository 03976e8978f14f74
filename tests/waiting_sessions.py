"""Sessions that wait for the results of two tool calls, and the events of one from its begin to its end."""

from __future__ import annotations

import asyncio
from typing import Any

from agentserve.messages import unpack_tokens
from tests.api_rig import TOOLS, Rig, hermes, settled, user
from tests.fakes import ScriptedEngine, say
from tests.sse import parse


class Waiting:
    """A session whose turn ended in two tool calls."""

    def __init__(self, rig: Rig, reply: dict[str, Any]) -> None:
        self.rig = rig
        self.id = reply["session_id"]
        self.message = reply["choices"][0]["message"]
        self.calls = [call["id"] for call in self.message["tool_calls"]]
        self.path = f"/agentserve/sessions/{self.id}/tool_results"

    async def post(self, body: Any) -> Any:
        return await self.rig.post(self.path, body)

    async def give(self, index: int, content: Any, **more: Any) -> Any:
        return await self.post({"call_id": self.calls[index], "content": content, **more})

    def last_prompt(self) -> str:
        return bytes(t for t in unpack_tokens(self.rig.engine.submits[-1].tokens) if t < 256).decode()


CALLS = hermes("weather", '{"city": "Oslo"}') + "\n" + hermes("now", "{}")


async def waiting(rig: Rig | None = None, **fields: Any) -> Waiting:
    rig = rig or Rig(ScriptedEngine())
    rig.engine.reply = say(CALLS)
    reply = await rig.chat([user("Weather?")], tools=TOOLS, **fields)
    rig.engine.reply = say("It rains.")
    made = Waiting(rig, reply)
    assert len(made.calls) == 2
    return made


def path(name: str, rest: str) -> str:
    return f"/agentserve/sessions/{name}/{rest}"


async def followed(rig: Rig, name: str, query: str = "", **headers: str) -> list[Any]:
    """All events of a session that is being closed: the stream has an end then."""
    asked = asyncio.create_task(rig.client.get(path(name, f"events{query}"), headers=headers))
    log = rig.context.chronicle.log_of(rig.context.directory.get("default", name))
    await settled(lambda: log.waited_for)
    await rig.client.delete(f"/agentserve/sessions/{name}")
    reply = await asked
    assert reply.status_code == 200
    blocks = reply.content.split(b"\n\n")
    assert blocks.pop() == b""
    return [event for event in map(parse, blocks) if event is not None]
