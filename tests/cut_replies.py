"""Replies that are cut anywhere, in every family's form of calls, and clients that go on by the next message
in every dialect."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from agentserve.messages import Submit, unpack_tokens
from agentserve.server.http.responses.desk import Desk
from tests.agents_machine import Machine
from tests.agents_rig import SESSIONS, Agent, message
from tests.api_rig import Rig, settled, user
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import ask
from tests.reply_forms import WRITERS, form
from tests.responses_rig import RESPONSES

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
NAMES = ("f", "g")


def said(family: str) -> str:
    """Two calls, one after the other."""
    one, two = (WRITERS[family](name, {"a": "x"}) for name in NAMES)
    return one + ("<|call|><|start|>assistant" if family == "gpt-oss" else "\n") + two


def cuts(family: str, *, every: bool = False) -> list[int]:
    """How many bytes of it there are: the first where what a client is handed becomes another. `every`: all
    there are."""
    text = said(family).encode()
    if every:
        return list(range(1, len(text)))
    kinds = [_kind(family, text[:count]) for count in range(1, len(text))]
    return [1, *(count for count, (one, two) in enumerate(pairwise(kinds), 2) if one != two)]


def _kind(family: str, text: bytes) -> object:
    parser = form(family).parser([])
    parser.feed(text.decode(errors="ignore"))
    parser.finish(cut=True)
    parsed = parser.parsed
    return bool(parsed.content), parsed.truncated, [(c.complete, c.arguments[:1]) for c in parsed.calls]


class Dialect(ABC):
    """One client of one session; `number` makes its history another than those of its like."""

    def __init__(self, number: int) -> None:
        self.number = number

    @abstractmethod
    async def first(self, rig: Rig, most: int) -> None:
        """The turn that is cut."""

    @abstractmethod
    async def next(self, rig: Rig) -> None:
        """A message more."""


class Chat(Dialect):
    """Whose client sends calls back as they are, not at all, closed, or with results for all of them."""

    async def first(self, rig: Rig, most: int) -> None:
        self.history: list[dict[str, Any]] = [user(f"chat {self.number}")]
        tools = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in NAMES]
        self.more: dict[str, Any] = {"tools": tools}
        reply = await rig.chat(self.history, max_tokens=most, **self.more)
        self.session = reply["session_id"]
        made = dict(reply["choices"][0]["message"])
        calls = made.get("tool_calls") or []
        if self.number % 4 == 1:
            made.pop("tool_calls", None)
        elif self.number % 4 == 2 and calls:
            made["tool_calls"] = [_closed(call) for call in calls]
        self.history.append(made)
        if self.number % 4 == 3:
            self.history += [{"role": "tool", "tool_call_id": c["id"], "content": "r"} for c in calls]

    async def next(self, rig: Rig) -> None:
        self.history.append(user("and now?"))
        reply = await rig.chat(self.history, **self.more)
        assert reply["session_id"] == self.session
        self.history.append(reply["choices"][0]["message"])


class Named(Chat):
    """In a session that it names."""

    async def first(self, rig: Rig, most: int) -> None:
        await super().first(rig, most)
        self.more["session_id"] = self.session


class Forked(Chat):
    """In a fork, which is in no other state than its parent."""

    async def first(self, rig: Rig, most: int) -> None:
        await super().first(rig, most)
        parent = await rig.session(self.session)
        for _ in range(2):  # a fork of the fork, too
            forked = (await rig.post(f"/agentserve/sessions/{self.session}/fork", {})).json()
            self.session = forked["id"]
            assert forked["state"] == parent["state"]
            assert len(forked["pending_tool_calls"]) == len(parent["pending_tool_calls"])
        self.more["session_id"] = self.session


class Responses(Dialect):
    async def first(self, rig: Rig, most: int) -> None:
        tools = [{"type": "function", "name": n, "parameters": PARAMETERS, "strict": False} for n in NAMES]
        self.body: dict[str, Any] = {"model": "tiny", "tools": tools}
        await self.open(rig)
        await self.ask(rig, f"responses {self.number}", max_output_tokens=most)

    async def next(self, rig: Rig) -> None:
        await self.ask(rig, "and now?")

    async def open(self, rig: Rig) -> None:
        """Where it is kept."""

    async def ask(self, rig: Rig, text: str, **more: Any) -> None:
        reply = await rig.post(RESPONSES, {**self.body, "input": text, **more})
        assert reply.status_code == 200, reply.text
        if "conversation" not in self.body:
            self.body["previous_response_id"] = reply.json()["id"]


class Conversation(Responses):
    async def open(self, rig: Rig) -> None:
        self.body["conversation"] = (await rig.post("/v1/conversations", {})).json()["id"]


class Messages(Dialect):
    """Whole messages, or streams, whose client closes what was cut."""

    async def first(self, rig: Rig, most: int) -> None:
        self.history: list[dict[str, Any]] = [user(f"messages {self.number}")]
        self.tools = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
        await self.ask(rig, most)

    async def next(self, rig: Rig) -> None:
        self.history.append(user("and now?"))
        await self.ask(rig, 100)

    async def ask(self, rig: Rig, most: int) -> None:
        stream = bool(self.number % 2)
        made = await ask(rig, *self.history, tools=self.tools, max_tokens=most, stream=stream)
        blocks = [
            {**block, "input": _input(block)} if block["type"] == "tool_use" else block
            for block in made["content"]
        ]
        for block in blocks:
            block.pop("partial", None)
        self.history.append({"role": "assistant", "content": blocks})


class Agents(Dialect):
    async def first(self, rig: Rig, most: int) -> None:
        tools = [{"type": "function", "name": n, "description": "", "parameters": PARAMETERS} for n in NAMES]
        agent = {"model": "tiny", "tools": tools, "max_output_tokens": most}
        body = {"environment": {"type": "none"}, "agent": agent, "input": f"agents {self.number}"}
        reply = await rig.post(SESSIONS, body)
        assert reply.status_code == 200, reply.text
        self.id: str = reply.json()["id"]
        await self._rested(rig)

    async def next(self, rig: Rig) -> None:
        await Agent(rig, {"id": self.id}).send(message("and now?"))
        await self._rested(rig)

    async def _rested(self, rig: Rig) -> None:
        agent = Agent(rig, {"id": self.id})
        await settled(lambda: agent.history.status != "in_progress")


DIALECTS: tuple[type[Dialect], ...] = (
    Chat,
    Named,
    Forked,
    Responses,
    Conversation,
    Messages,
    Agents,
)


def _closed(call: dict[str, Any]) -> dict[str, Any]:
    try:
        json.loads(call["function"]["arguments"])
    except ValueError:
        return {**call, "function": {**call["function"], "arguments": "{}"}}
    return call


def _input(block: dict[str, Any]) -> Any:
    try:
        return block["input"] if "input" in block else json.loads(block["partial"])
    except (KeyError, ValueError):
        return {}


async def check(family: str, dialect: type[Dialect], counts: Sequence[int]) -> int:
    """Cut there, each goes on: every other one before its server dies, and all of them after it. How many
    were cut."""
    engine = ScriptedEngine()
    machine = Machine(engine, reply_form=form(family), responses=Desk(lambda: 1e9))
    live: list[tuple[Dialect, Submit, list[int]]] = []
    for number, count in enumerate(counts):
        client = dialect(number)
        engine.reply = say(said(family))
        await client.first(machine.rig, count)
        begun = engine.submits[-1]
        session = machine.rig.context.directory.find(begun.session)
        assert session is not None
        if session.pending:  # it was cut between its calls, and its client is to run them
            assert all(json.loads(call.arguments) == {"a": "x"} for call in session.pending.values())
            continue
        replies = list(session.replies.values())
        live.append((client, begun, list(replies[-1]) if replies else []))
        if number % 2:
            await _goes_on(machine, *live[-1])
    await machine.restart()
    for one in live:
        await _goes_on(machine, *one)
    await machine.close()
    return len(live)


async def _goes_on(machine: Machine, client: Dialect, begun: Submit, reply: list[int]) -> None:
    engine = machine.engine
    engine.reply = say("ok")
    before = len(engine.submits)
    await client.next(machine.rig)
    [submit] = engine.submits[before:]
    if not isinstance(client, Forked):
        assert submit.session == begun.session, reply
    one, two = list(unpack_tokens(begun.tokens)), list(unpack_tokens(submit.tokens))
    assert two[: len(one)] == one, bytes(i for i in two if i < 256)
    assert two[len(one) :][: len(reply)] == reply, bytes(i for i in two[len(one) :] if i < 256)
