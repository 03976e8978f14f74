"""Agents with tools, as scripts: everything one does is drawn from its seed, so it can be played again.

An agent is told something once, however often it has to ask: after a death it sends its request again,
as it was. What its turns say is compared token by token with what they said when nothing died.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentserve.bench.agents.words import WORDS
from tests.prove.crash.book import Book, Sizes, Unsuitable
from tests.prove.crash.world import SESSIONS, Told, World

CHAT = "/v1/chat/completions"
CITIES = ["Oslo", "Rome", "Lima"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
STYLES = ("post", "stream", "upload", "chat")

Message = dict[str, Any]


@dataclass
class Reply:
    session: str = ""
    ids: list[int] = field(default_factory=list)
    content: str = ""
    calls: list[Message] = field(default_factory=list)
    reason: str = ""

    @property
    def message(self) -> Message:
        said: Message = {"role": "assistant", "content": self.content}
        return said | {"tool_calls": self.calls} if self.calls else said


class Agent:
    """One session of a script: `name` is where it began, `salt` keeps its KV apart from its twins'."""

    def __init__(self, world: World, book: Book, sizes: Sizes, script: int, name: str, salt: str) -> None:
        self.name = name
        self._world = world
        self._book = book
        self._sizes = sizes
        self._script = script
        self._salt = salt
        self._rng = random.Random(script)
        self._messages: list[Message] = [self._user()]
        self._calls: list[str] = []

    async def acts(self) -> AsyncIterator[None]:
        """The whole script; it can be left between two acts, and taken up again."""
        follows = self._rng.random() < 0.4
        for round_ in range(self._sizes.rounds):
            await self.ask(f"{round_}.ask")
            if follows and not round_:
                self._world.follow(self.name)
            yield
            results = [f"{self._rng.choice(WORDS)} " * self._rng.randint(1, 30) for _ in self._calls]
            child = await self.fork() if self._rng.random() < 0.6 else None
            await asyncio.sleep(self._rng.uniform(0, 0.03))  # the tool runs
            styles = self._rng.sample(STYLES, 2)
            for agent, style in [(self, styles[0]), (child, styles[1])]:
                if agent is not None:
                    yield
                    await agent.answer(f"{round_}.answer", results, style)
            yield
            self._messages.append(self._user())
            await self.say(f"{round_}.say")
            if child is not None:
                yield
                await self._world.close(child.name)
            yield
            self._messages.append(self._user())
        await self._world.close(self.name)

    def _user(self) -> Message:
        words = self._rng.choices(WORDS, k=self._rng.randint(8, self._sizes.words))
        return {"role": "user", "content": f"{self._script}: {' '.join(words)}"}

    # --- acts -----------------------------------------------------------------------------

    async def ask(self, turn: str) -> None:
        """A turn that ends in tool calls."""
        reply = await self._chat(turn, calls=True)
        if not reply.calls or reply.reason == "length" or reply.content:
            raise Unsuitable
        self._calls = [call["id"] for call in reply.calls]
        self._ended(reply)

    async def say(self, turn: str) -> None:
        """A turn that does not."""
        self._ended(self._text(await self._chat(turn)))

    async def answer(self, turn: str, results: list[str], style: str) -> None:
        """Bring the results of the calls, and have the turn that goes on from them."""
        calls, self._calls = self._calls, []
        told = [
            {"role": "tool", "tool_call_id": call, "content": text}
            for call, text in zip(calls, results, strict=True)
        ]
        reply = None
        if style != "chat":
            reply = await self._bring(turn, calls, results, style)
        self._messages += told
        if reply is None:
            reply = await self._chat(turn)
        self._ended(self._text(reply))

    async def fork(self) -> Agent:
        """A twin of this agent, in a session of its own that waits for its own results."""

        async def attempt(tries: int) -> Message:
            reply = await self._world.http.post(f"{self._world.url}{SESSIONS}/{self.name}/fork")
            assert reply.status_code == 201, reply.text
            found: Message = reply.json()
            return found

        made = await self._world.surely(attempt)
        assert made["pending_tool_calls"] == self._calls
        child = Agent(self._world, self._book, self._sizes, self._script, made["id"], self._salt)
        child._messages, child._calls = list(self._messages), list(self._calls)
        self._world.know(child.name, Told(made["turns"], waiting=True))
        return child

    def _ended(self, reply: Reply) -> None:
        """A turn is over, and this agent was told so."""
        self._messages.append(reply.message)
        told = self._world.told.get(self.name)
        self._world.know(self.name, Told(told.turns + 1 if told else 1, waiting=bool(reply.calls)))

    def _text(self, reply: Reply) -> Reply:
        """A reply without calls, and not one that the end of the context cut."""
        if reply.calls or (reply.reason == "length" and len(reply.ids) < self._sizes.text_tokens):
            raise Unsuitable
        return reply

    # --- requests -------------------------------------------------------------------------

    async def _chat(self, turn: str, *, calls: bool = False) -> Reply:
        """The next turn by chat completions. Where it was on disk and this agent had not been told, the
        same request runs beside it, in a session that takes its place."""
        body = {
            "session_id": self.name,
            "model": "smollm2-135m",
            "messages": self._messages,
            "tools": TOOLS,
            "tool_choice": self._sizes.choice if calls else "auto",
            "max_tokens": self._sizes.call_tokens if calls else self._sizes.text_tokens,
            "temperature": self._sizes.temperature,
            "seed": self._script,
            "cache_salt": self._salt,
            "return_token_ids": True,
            "stream": True,
        }
        self._world.names.add(self.name)
        reply = await self._world.surely(lambda tries: self._streamed(turn, CHAT, body))
        if reply.session != self.name:
            left, self.name = self.name, reply.session
            self._world.recovered += 1
            self._world.know(self.name, Told(0, waiting=False))
            await self._world.close(left)
        return reply

    async def _bring(self, turn: str, calls: list[str], results: list[str], style: str) -> Reply | None:
        """By the session routes. None: the turn was on disk, but what it said is not told any more."""
        path = f"{SESSIONS}/{self.name}/tool_results"
        for call, text in zip(calls[:-1], results, strict=False):
            await self._world.surely(lambda tries, call=call, text=text: self._receipt(path, call, text))
            self._world.told[self.name].results.add(call)
        call, text, most = calls[-1], results[-1], self._sizes.text_tokens

        async def attempt(tries: int) -> Reply | None:
            if style == "upload":
                url = f"{path}/{call}/stream?max_tokens={most}"
                reply = await self._world.http.post(self._world.url + url, content=_pieces(text))
                return self._whole(turn, reply, tries)
            body = {"call_id": call, "content": text, "max_tokens": most, "stream": style == "stream"}
            if style == "stream":
                return await self._streamed(turn, path, body, tries)
            reply = await self._world.http.post(self._world.url + path, json=body)
            return self._whole(turn, reply, tries)

        return await self._world.surely(attempt)

    async def _receipt(self, path: str, call: str, text: str) -> None:
        reply = await self._world.http.post(self._world.url + path, json={"call_id": call, "content": text})
        assert reply.status_code == 200, reply.text
        [result] = reply.json()["results"]
        assert result["call_id"] == call

    def _whole(self, turn: str, response: httpx.Response, tries: int) -> Reply | None:
        if response.status_code == 400 and not self._book.closed:
            raise Unsuitable
        assert response.status_code == 200, response.text
        reply = response.json()
        if reply["object"] == "agentserve.tool_results":
            assert tries, "results that nobody has sent were taken"
            assert (reply["outstanding"], reply["running_turn"]) == ([], None), reply
            assert {result["status"] for result in reply["results"]} == {"repeated"}
            return None
        choice = reply["choices"][0]
        message = choice["message"]
        found = Reply(
            reply["session_id"],
            choice["token_ids"],
            message["content"] or "",
            message.get("tool_calls") or [],
            choice["finish_reason"],
        )
        self._book.says((self._script, turn), found.ids)
        return found

    async def _streamed(self, turn: str, path: str, body: Message, tries: int = 0) -> Any:
        found, done = Reply(), False
        try:
            async with self._world.http.stream("POST", self._world.url + path, json=body) as reply:
                if "event-stream" not in reply.headers["content-type"]:
                    await reply.aread()
                    return self._whole(turn, reply, tries)
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        self._world.saw()
                        _take(found, json.loads(line[6:]))
        finally:
            if not done:
                self._book.begins((self._script, turn), found.ids)
            if not done and found.reason:
                self._world.told.setdefault(self.name, Told(0, waiting=False)).finished = True
        assert done, "a stream ended early, and nobody said why"
        self._book.says((self._script, turn), found.ids)
        return found


def _take(found: Reply, chunk: Message) -> None:
    assert "error" not in chunk, chunk
    found.session = chunk["session_id"]
    for choice in chunk["choices"]:
        found.ids += choice.get("token_ids") or []
        found.reason = choice["finish_reason"] or found.reason
        delta = choice["delta"]
        found.content += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            if piece["index"] == len(found.calls):
                found.calls.append({key: piece[key] for key in ("id", "type")} | {"function": {}})
                found.calls[-1]["function"] |= piece["function"]
            else:
                found.calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


async def _pieces(text: str) -> AsyncIterator[bytes]:
    for at in range(0, len(text), 40):
        yield text[at : at + 40].encode()
        await asyncio.sleep(0.001)
