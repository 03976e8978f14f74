"""Random lives of an agent's session: messages, results in any order, cancels, broken streams, restarts."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.messages import Submit, unpack_tokens
from agentserve.types import FinishReason
from tests.agents_machine import Machine
from tests.agents_rig import CANCEL, NOW, WEATHER, check_events, created, message, result
from tests.api_rig import hermes, settled
from tests.fakes import Script, ScriptedEngine, say

ACTIONS = (
    "message",
    "result",
    "result",
    "result",
    "again",
    "forged",
    "cancel",
    "read",
    "restart",
    "drop",
    "wait",
)
TOOLS = [WEATHER, NOW]


def _done_since(item: dict[str, Any], after: list[dict[str, Any]]) -> bool:
    """Whether it is a call that a restart still had to end, and is the same but for that."""
    return item.get("status") == "in_progress" and item | {"status": "completed"} in after


class Life:
    """One session, and what must be true of it."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.machine = Machine(ScriptedEngine(self._reply))
        self.given: dict[str, str] = {}  # result of each call that was accepted
        self.said = 0

    def _reply(self, command: Submit) -> Script:
        kind = self._draw.randrange(8)
        if kind < 4:
            calls = "".join(hermes("now", f'{{"n": {n}}}') for n in range(self._draw.randint(1, 3)))
            return say(("Hm. " if kind % 2 else "") + calls)
        if kind == 4:
            return Script([], FinishReason.ERROR, "broke")
        return say("Done.")

    async def start(self) -> None:
        self.agent = await created(self.machine.rig, agent={"tools": TOOLS})

    async def settle(self) -> None:
        """Until nothing happens without the client."""
        for _ in range(400):
            await asyncio.sleep(0.001)
            history = self.agent.history
            if history.status == "idle" or (history.status == "requires_action" and history.required()):
                return
        raise AssertionError(f"stuck: {self.agent.history.turns[-1]}")

    async def step(self, action: str, pick: int) -> None:
        agent = self.agent
        # A restart may still be making items of results that it found: those calls are answered.
        required = [call.call for call in agent.history.required() if call.call not in self.given]
        if action == "message":
            self.said += 1
            wanted = 202 if agent.history.status == "idle" else 409
            await agent.send(message(f"m{self.said}"), status=wanted)
        elif action == "result" and required:
            await self._give(required[pick % len(required)], f"<r{self._draw.randrange(10**6)}>")
        elif action == "again" and self.given:
            call = sorted(self.given)[pick % len(self.given)]
            before = await agent.items()
            turn = agent.history.call(call)[1].id
            await agent.send(result({"call_id": call, "turn_id": turn}, self.given[call]))
            await agent.send(result({"call_id": call, "turn_id": turn}, "<other>"), status=409)
            after = await agent.items()  # a restart may still be making items of what it found
            assert [item for item in before if item not in after and not _done_since(item, after)] == []
            outputs = [item["call_id"] for item in after if item["type"] == "function_call_output"]
            assert len(set(outputs)) == len(outputs)
            fresh = [item for item in after if item not in before]
            assert {item["type"] for item in fresh} <= {"function_call_output"}
            assert {item["call_id"] for item in fresh} <= self.given.keys()
        elif action == "forged":
            turn = agent.history.turns[-1].id if agent.history.turns else "t"
            error = await agent.send(result({"call_id": "call_x", "turn_id": turn}), status=400)
            assert error["message"] == "Unknown pending tool call: call_x"
        elif action == "cancel":
            await agent.send(CANCEL)
            assert agent.history.status == "idle"
        elif action == "drop":
            await self._drop(required, pick)
        elif action == "read":
            await self._read()
        elif action == "restart":
            check_events(_whole(agent.events()))
            self.agent = await self.machine.kill(agent, lost=2 * pick)

    async def _give(self, call: str, output: str) -> None:
        turn = self.agent.history.call(call)[1].id
        await self.agent.send(result({"call_id": call, "turn_id": turn}, output))
        self.given[call] = output

    async def _drop(self, required: list[str], pick: int) -> None:
        """A request is cut off somewhere: it has its whole effect, or none."""
        agent = self.agent
        event, output = message("dropped"), f"<d{self._draw.randrange(10**6)}>"
        if required:
            event = result({"call_id": required[0], "turn_id": agent.history.turns[-1].id}, output)
        body = {"events": [event]}
        post = asyncio.create_task(agent.rig.post(f"{agent.path}/events", body))
        for _ in range(3 * pick + self._draw.randrange(4)):
            await asyncio.sleep(0)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        await self.settle()
        if required and required[0] not in [call.call for call in agent.history.required()]:
            self.given[required[0]] = output

    async def _read(self) -> None:
        """The lists agree with each other at any time."""
        agent = self.agent
        items = await agent.items()
        by_turn: list[Any] = []
        for turn in (await agent.get("/turns?order=asc&limit=100"))["data"]:
            by_turn += (await agent.get(f"/turns/{turn['id']}/items?order=asc&limit=100"))["data"]
        assert by_turn == items

    async def check(self) -> None:
        agent, engine = self.agent, self.machine.engine
        await self.settle()
        if agent.history.status != "idle":
            await agent.send(CANCEL)
        engine.reply = say("The end.")
        await agent.send(message("last"))
        await self.settle()
        items = await agent.items()
        assert items[-1]["content"][0]["text"] == "The end."
        prompt = bytes(t for t in unpack_tokens(engine.submits[-1].tokens) if t < 256).decode()
        for call, output in self.given.items():
            own = [i for i in items if i["type"] == "function_call_output" and i["call_id"] == call]
            assert [item["output"] for item in own] == [output]
            assert prompt.count(output) == 1, "a result takes effect once"
        order = [
            self.given[i["call_id"]]
            for i in items
            if i["type"] == "function_call" and i["call_id"] in self.given
        ]
        assert sorted(order, key=prompt.index) == order, "results stand in call order"
        statuses = {turn.status for turn in agent.history.turns}
        assert statuses <= {"completed", "failed", "cancelled"}
        check_events(_whole(agent.events()))
        await self._read()
        self.machine.rig.check_rest()
        await settled(lambda: not len(self.machine.rig.context.agents))


def _whole(events: list[Any]) -> list[Any]:
    """From the first turn on that began under this server."""
    kinds = [event["type"] for event in events]
    start = next((i for i, kind in enumerate(kinds) if kind == "agent.session.turn.created"), len(kinds))
    return events[start:]


async def _run(seed: int, steps: list[tuple[str, int, bool]]) -> None:
    life = Life(seed)
    await life.start()
    try:
        for action, pick, wait in steps:
            await life.step(action, pick)
            if wait:
                await life.settle()
        await life.check()
    finally:
        await life.machine.close()


STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.booleans()), min_size=4, max_size=24
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), STEPS)
def test_whatever_happens_the_session_can_be_used(seed: int, steps: list[tuple[str, int, bool]]) -> None:
    asyncio.run(_run(seed, steps))


@pytest.mark.parametrize("after", ["result", "drop"])
def test_a_result_that_was_cut_off_does_not_come_back_with_the_next_server(after: str) -> None:
    asyncio.run(_run(1, [("message", 0, True), ("drop", 1, False), ("restart", 0, False), (after, 0, False)]))


def test_one_life_with_everything() -> None:
    steps = [(action, n, True) for n in range(4) for action in ACTIONS]
    asyncio.run(_run(5, steps))
