"""The application with webhooks that go to a scripted receiver, in time that passes when a test says so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from agentserve.server.http.app import begin_webhooks
from agentserve.server.webhooks.hooks import Hooks
from agentserve.server.webhooks.making import make_hooks
from tests.agents_rig import Agent, body
from tests.api_rig import Rig, hermes, settled
from tests.fakes import Script, ScriptedEngine, say
from tests.webhook_rig import ScriptedSender, VirtualTime, result
from tools_bridge.webhooks.replies import Answered
from tools_bridge.webhooks.signing import verify

ENDPOINTS = "/v1/webhook_endpoints"
URL = "https://tools.example/hook"
CALL = hermes("weather", '{"city": "Oslo"}')
ACTION = "agent.session.action_required"
LATER = Answered(202)
__all__ = ["result"]


class HooksRig:
    def __init__(
        self,
        folder: Path | None = None,
        hooks: Hooks | None = None,
        like: HooksRig | None = None,
        leaving: bool = False,
        **options: Any,
    ) -> None:
        """`like`: with the endpoints of another. `leaving`: it publishes nothing."""
        self.clock = VirtualTime()
        self.sender = ScriptedSender(self.clock)
        self.hooks = hooks or make_hooks(
            folder,
            callback_url="https://agents.example",
            wall=self.clock.unix,
            sender=self.sender,
            clock=self.clock,
            draw=lambda: 0.5,
        )
        self.rig = Rig(
            ScriptedEngine(),
            hooks=self.hooks,
            wall=self.clock.unix,
            now=self.hooks.now,
            sleep=self.sleep,
            **options,
        )
        self.secrets: dict[str, str] = {} if like is None else like.secrets
        self.hooks.leaving = leaving
        for endpoint in () if like is None else like.hooks.ledger.endpoints.values():
            self.hooks.ledger.change_endpoint(endpoint)
        begin_webhooks(self.rig.context)

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            cancel = self.clock.later(seconds, lambda: over.done() or over.set_result(None))
            try:
                await over
            finally:
                cancel()

    async def endpoint(self, url: str = URL, types: tuple[str, ...] = (ACTION,), **fields: Any) -> str:
        asked = {"name": "tools", "url": url, "event_types": list(types), **fields}
        reply = await self.rig.post(ENDPOINTS, asked)
        assert reply.status_code == 200, reply.text
        self.secrets[reply.json()["id"]] = reply.json()["signing_secret"]
        id_: str = reply.json()["id"]
        return id_

    async def agent(self, endpoint: str, says: Script | str = CALL, **tool: Any) -> Agent:
        replies = iter([say(says) if isinstance(says, str) else says])
        self.rig.engine.reply = lambda command: next(replies, say("It rains."))
        reply = await self.rig.post(
            "/v1/agents/sessions", body({"tools": [webhook_tool(endpoint, **tool)]}, input="Weather?")
        )
        assert reply.status_code == 200, reply.text
        made = Agent(self.rig, reply.json())
        await settled(lambda: len(self.rig.engine.submits) >= 1 and not self.rig.engine.live)
        return made

    async def outcome(self, agent: Agent) -> Any:
        """What the model was told of its call."""
        await agent.until("idle")
        items = [item for item in await agent.items() if item["type"] == "function_call_output"]
        assert len(items) == 1, items
        return items[0]["error"] if items[0]["output"] is None else items[0]["output"]

    async def sent(self, number: int = 1) -> list[dict[str, Any]]:
        """The bodies of the first attempts, whose signatures are right."""
        await settled(lambda: len(self.sender.posts) >= number)
        for post in self.sender.posts:
            verify(list(self.secrets.values()), post.headers, post.body, self.clock.unix())
        return [json.loads(post.body) for post in self.sender.posts]

    async def callback(self, url: str, content: Any, **headers: str) -> tuple[int, str | None]:
        path = url.removeprefix("https://agents.example")
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        reply = await self.rig.client.post(
            path, content=data, headers={"content-type": "application/json", **headers}
        )
        return reply.status_code, reply.json()["error"]["code"] if reply.content else None

    async def close(self) -> None:
        self.hooks.leave()
        await self.rig.context.agents.stop()
        await self.hooks.close()


def webhook_tool(endpoint: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "webhook",
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        **({} if endpoint is None else {"webhook": endpoint}),
        **more,
    }
