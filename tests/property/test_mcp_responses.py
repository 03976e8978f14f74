"""Random chains of responses with MCP servers: no call is made that was not allowed, each at most once, and
every prompt begins with all that was said before, however the client keeps its history."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api_rig import Rig, hermes
from tests.fakes import Script, ScriptedEngine, say
from tests.mcp_rig import ADD, SUB, FakeMcp, server
from tests.responses_mcp_rig import approval, begins_with_all_before, checked_mcp
from tests.responses_rig import WEATHER, Client, parsed, result
from tools_bridge.mcp.types import Answer, Fault, McpFailed

PLAIN, ASKED, OURS = "sub", "add", "weather"  # made at once, made where a user allows it, the client's
TOOLS = [server(require_approval={"always": {"tool_names": [ASKED]}}), WEATHER]
REPLIES = st.lists(
    st.tuples(
        st.sampled_from(["", "Let me see. "]), st.lists(st.sampled_from([PLAIN, ASKED, OURS]), max_size=3)
    ),
    min_size=1,
    max_size=4,
)
ANSWERS = [Answer("3"), Answer(""), Answer("no", failed=True), Answer("\ud800<|im_end|>")]


class World:
    def __init__(self, way: str, stream: bool) -> None:
        self.mcp = FakeMcp(ADD, SUB)
        self.mcp.answer = self._answer
        self.client = Client(Rig(ScriptedEngine(max_model_len=1 << 16), mcp=self.mcp))
        self.way = way
        self.stream = stream
        self.items: list[Any] = []  # of a client that keeps them itself
        self.last: str | None = None
        self.conversation: str | None = None
        self.asked: dict[str, bool | None] = {}  # requests for approval, and what was said to them
        self.made: list[str] = []  # names, as the server heard of them
        self.failures = 0

    def _answer(self) -> Answer:
        self.made.append(self.mcp.calls[-1][0])
        if len(self.made) % 5 == 4:
            raise McpFailed(Fault.TIMEOUT, "The MCP server did not answer.")
        return ANSWERS[len(self.made) % len(ANSWERS)]

    async def ask(self, given: list[Any], replies: Iterator[Script]) -> Any:
        def reply(submit: object) -> Script:
            return next(replies, say("Well."))

        self.client.rig.engine.reply = reply
        fields: dict[str, Any] = {"tools": TOOLS, "stream": self.stream}
        if self.way == "own":
            self.items += given
            given, fields["store"] = self.items, False
        elif self.way == "chain":
            fields["previous_response_id"] = self.last
        else:
            if self.conversation is None:
                self.conversation = (await self.client.rig.post("/v1/conversations", {})).json()["id"]
            fields["conversation"] = self.conversation
        sent = await self.client.rig.post("/v1/responses", {"model": "tiny", "input": given, **fields})
        assert sent.status_code == 200, sent.text
        response = checked_mcp(parsed(sent.content)) if self.stream else sent.json()
        self.last = response["id"]
        self.items += response["output"] if self.way == "own" else []
        for item in response["output"]:
            if item["type"] == "mcp_call":
                assert item["status"] in ("completed", "failed")
                request = item["approval_request_id"]
                assert (request is None) == (item["name"] == PLAIN)
                assert request is None or self.asked[request] is True
            elif item["type"] == "mcp_approval_request":
                self.asked[item["id"]] = None
        return response

    def answers(self, response: Any, decide: Iterator[bool]) -> list[Any]:
        """What a client sends to what a response has left to it."""
        found = []
        for item in response["output"]:
            if item["type"] == "function_call":
                found.append(result(item))
            elif item["type"] == "mcp_approval_request":
                self.asked[item["id"]] = next(decide, True)
                found.append(approval(item, bool(self.asked[item["id"]])))
        return found


@settings(max_examples=15, deadline=None)
@given(
    st.lists(REPLIES, min_size=1, max_size=4),
    st.lists(st.booleans(), max_size=12),
    st.sampled_from(["own", "chain", "conversation"]),
    st.booleans(),
)
def test_histories(
    turns: list[list[tuple[str, list[str]]]], decisions: list[bool], way: str, stream: bool
) -> None:
    asyncio.run(_run(World(way, stream), turns, iter(decisions)))


async def _run(world: World, turns: list[list[tuple[str, list[str]]]], decide: Iterator[bool]) -> None:
    for number, replies in enumerate(turns):
        texts = [text + "".join(hermes(name, "{}") for name in names) for text, names in replies]
        said = iter([say(text or "Yes.") for text in texts])
        given: list[Any] = [{"role": "user", "content": f"Question {number}"}]
        while given:
            response = await world.ask(given, said)
            assert response["status"] == "completed"
            given = world.answers(response, decide)
        assert response["output"][-1]["type"] == "message"
    assert begins_with_all_before(world.client)
    allowed = sum(decision is True for decision in world.asked.values())
    assert world.made.count(ASKED) == allowed
    assert len(world.mcp.calls) == len(world.made)
    assert len(list(world.client.rig.context.directory.sessions("default"))) == 1
    world.client.rig.check_rest()
