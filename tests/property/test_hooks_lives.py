"""Webhook tools of many sessions at once, with receivers, clients, cancels and restarts at random."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.agents_rig import CANCEL, SESSIONS, Agent, body, check_events
from tests.agents_rig import result as tool_result
from tests.api_rig import hermes
from tests.fakes import say
from tests.hooks_rig import ENDPOINTS, LATER, HooksRig, result, webhook_tool
from tests.webhook_rig import settle
from tools_bridge.webhooks.replies import Answered, Failed, Fault

URLS = [f"https://tools{n}.example/hook" for n in range(3)]
REPLIES = [
    *(LATER, LATER, result("rain"), result("sun"), result("", success=False, error="no city")),
    *(Answered(500), Answered(429), Failed(Fault.TIMEOUT), Failed(Fault.CONNECT), Failed(Fault.REFUSED)),
    Answered(200, content_type="text/html", body=b"<p>"),
]


class Life:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.desk = HooksRig()
        self.agents: list[Agent] = []
        self.urls: dict[str, str] = {}  # of callbacks
        self.brought: dict[str, list[str]] = {}  # what was accepted for a call

    async def open(self) -> None:
        draw = self.random
        tools = [
            webhook_tool(draw.choice(self.endpoints), name=name, timeout=draw.choice([3, 30, 300]))
            for name in ("weather", "now")
        ]
        reply = await self.desk.rig.post(SESSIONS, body({"tools": tools}))
        self.agents.append(Agent(self.desk.rig, reply.json()))

    async def ask(self) -> None:
        draw, desk = self.random, self.desk
        agent = draw.choice(self.agents)
        names = draw.sample(["weather", "now"], draw.randint(1, 2))
        text = "".join(hermes(name, "{}") for name in names)
        desk.rig.engine.reply = lambda command: say(draw.choice([text, "Done.", "Done."]))
        if agent.history.active is None:
            await agent.say("Go on.")

    async def wait(self) -> None:
        await self.desk.clock.pass_by(self.random.choice([0.0, 0.5, 2.0, 10.0, 60.0]))

    async def cancel(self) -> None:
        agent = self.random.choice(self.agents)
        if agent.history.active is not None:
            await agent.send(CANCEL)

    async def post(self) -> None:
        """At a callback URL that was told, perhaps long ago."""
        for sent in self.desk.sender.posts:
            action = json.loads(sent.body)["data"].get("required_action", {})
            if "callback_url" in action:
                self.urls[action["callback_url"]] = action["call_id"]
        if self.urls:
            url = self.random.choice(list(self.urls))
            output = self.random.choice(["rain", "sun"])
            status, _ = await self.desk.callback(url, {"output": output})
            assert status in (202, 409, 410)
            if status == 202:
                self.brought.setdefault(self.urls[url], []).append(output)

    async def bring(self) -> None:
        """As the client."""
        agent = self.random.choice(self.agents)
        actions = (await agent.get())["required_actions"]
        if actions:
            event = tool_result(self.random.choice(actions), "sun")
            reply = await self.desk.rig.post(f"{agent.path}/events", {"events": [event]})
            assert reply.status_code in (202, 400, 409), reply.text  # another may have come meanwhile

    async def disturb(self) -> None:
        endpoint = self.random.choice(self.endpoints)
        word = self.random.choice(["disable", "enable", "enable", "rotate_secret"])
        body = {"keep_old_secret_active_for_24_hours": True} if word == "rotate_secret" else {}
        reply = await self.desk.rig.post(f"{ENDPOINTS}/{endpoint}/{word}", body)
        assert reply.status_code == 200, reply.text

    async def live(self, steps: int) -> None:
        desk, draw = self.desk, self.random
        for url in URLS:
            desk.sender.answer(url, *draw.choices(REPLIES, k=200))
        self.endpoints = [await desk.endpoint(url, payload="full") for url in URLS]
        for _ in range(3):
            await self.open()
        acts = [self.ask] * 4 + [self.wait] * 4 + [self.post] * 2 + [self.bring, self.cancel, self.disturb]
        for _ in range(steps):
            await draw.choice(acts)()
            await settle(draw.choice([0, 1, 5, 30]))
            desk.hooks.ledger.check()
        desk.rig.engine.reply = say("Done.")
        for _ in range(20):
            await desk.clock.pass_by(400)
            await settle(200)
            if all(agent.history.active is None for agent in self.agents):
                break

    async def check(self) -> None:
        desk = self.desk
        for agent in self.agents:
            assert agent.history.active is None, agent.history.active
            check_events(agent.events())
            items = await self.items(agent)
            calls = [item["call_id"] for item in items if item["type"] == "function_call"]
            outputs = [item for item in items if item["type"] == "function_call_output"]
            assert len(calls) == len(set(calls))
            assert len({item["call_id"] for item in outputs}) == len(outputs)
            for item in outputs:
                for brought in self.brought.get(item["call_id"], []):
                    assert item["output"] == brought
        ledger = desk.hooks.ledger
        assert not ledger.pending()
        assert not ledger.unacknowledged()
        assert not desk.hooks._waiting
        assert not desk.hooks._keys
        assert not desk.hooks._early
        desk.rig.check_rest()

    async def items(self, agent: Agent) -> list[Any]:
        found: list[Any] = []
        after = ""
        while True:
            page = await agent.get(f"/items?order=asc&limit=100{after}")
            found += page["data"]
            if not page["has_more"]:
                return found
            after = f"&after={page['last_id']}"


@pytest.mark.parametrize("seed", range(8))
async def test_every_call_ends_and_nothing_is_owed(seed: int) -> None:
    life = Life(seed)
    await life.live(60)
    await life.check()
    await life.desk.close()
