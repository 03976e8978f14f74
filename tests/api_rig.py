"""The real application on a scripted engine, in process or behind a real socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from agentserve.server.http.app import create_app
from agentserve.server.http.context import ServerContext, ServerOptions
from agentserve.server.http.reply_parsers import ReplyParsers
from tests.fakes import END, EOS, ByteTemplate, ByteTokenizer, NoGrammars, ScriptedEngine, chain
from tools_bridge.registry import ReplyForm

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Rig:
    """An application and a client of it."""

    def __init__(
        self,
        engine: ScriptedEngine | None = None,
        template: Any = None,
        directory: Any = None,
        journal: Any = None,
        clock: Any = None,
        chronicle: Any = None,
        responses: Any = None,
        reply_form: ReplyForm | None = None,
        keyring: Any = None,
        terms: Any = None,
        audit: Any = None,
        agents: Any = None,
        tools: Any = None,
        mcp: Any = None,
        sleep: Any = asyncio.sleep,
        wall: Any = time.time,
        now: Any = None,
        hooks: Any = None,
        recording: Any = None,
        **options: Any,
    ) -> None:
        self.engine = engine or ScriptedEngine()
        self.grammars = NoGrammars()
        self.app: Starlette = create_app(
            self.engine,
            ServerOptions(model="tiny", **options),
            tokenizer=ByteTokenizer(),
            template=template or ByteTemplate(),
            end_ids=(END, EOS),
            chain=chain,
            tool_parser=ReplyParsers(reply_form or ReplyForm()),
            grammar_maker=self.grammars,
            directory=directory,
            journal=journal,
            clock=clock,
            chronicle=chronicle,
            responses=responses,
            keyring=keyring,
            terms=terms,
            audit=audit,
            agents=agents,
            tools=tools,
            mcp=mcp,
            sleep=sleep,
            wall=wall,
            now=now,
            hooks=hooks,
            recording=recording,
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://localhost"
        )

    @property
    def context(self) -> ServerContext:
        return self.app.state.context

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        if isinstance(body, dict) and ("messages" in body or "prompt" in body):
            body = {"model": "tiny", **body}
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        return await self.client.post(path, content=content, headers=headers)

    async def chat(
        self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
    ) -> Any:
        reply = await self.post(CHAT, {"messages": messages, **fields}, headers)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def chat_stream(self, messages: list[dict[str, Any]], **fields: Any) -> list[Any]:
        reply = await self.post(CHAT, {"messages": messages, "stream": True, **fields})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return events(reply.content)

    async def session(self, name: str) -> Any:
        reply = await self.client.get(f"/agentserve/sessions/{name}")
        assert reply.status_code == 200, reply.text
        return reply.json()

    def check_rest(self) -> None:
        """Nothing runs, nothing is leased, and the directory's books agree."""
        assert not self.engine.live
        directory = self.context.directory
        sessions = list(directory.sessions("default"))
        assert all(session.running is None and session.committed for session in sessions)
        assert directory.size_bytes == sum(session.cost for session in sessions)
        assert directory.count("default") == len(sessions)


def events(content: bytes) -> list[Any]:
    """The JSON of all events; the last is "[DONE]" where it came."""
    found: list[Any] = []
    for block in content.split(b"\n\n"):
        if block.startswith(b"data: "):
            data = block.removeprefix(b"data: ")
            found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
        else:
            assert not block or block.startswith(b":"), block
    return found


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """What a client puts together from a chat stream."""
    message: dict[str, Any] = {"content": "", "tool_calls": [], "finish_reason": None, "usage": None}
    for chunk in chunks:
        if chunk == "[DONE]":
            continue
        message["usage"] = chunk.get("usage") or message["usage"]
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(json.loads(json.dumps(piece)))
                else:
                    assert set(piece) == {"index", "function"}
                    assert set(piece["function"]) == {"arguments"}
                    call = message["tool_calls"][piece["index"]]
                    call["function"]["arguments"] += piece["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The application behind a real socket on a free loopback port; gives its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
            assert not task.done()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def settled(done: Any, patience: int = 4000) -> None:
    """Let the loop run until `done()`; fails when it never comes true."""
    for _ in range(patience):
        if done():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never settled")
