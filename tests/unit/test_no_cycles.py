"""What a request took is free when it is over, without the collector of cycles: that one stops every stream,
so it is let look at old objects when nobody waits."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from agentserve.server.http.wire_bounds import Connections, WireBounds, bounded_protocol
from tests.api_rig import CHAT, Rig, hermes, settled, user
from tests.fakes import ScriptedEngine, say

OURS = ("agentserve", "uvicorn")
AGENT = {"model": "tiny", "instructions": "Be brief."}
RESPONSE = {"model": "tiny", "input": "Hi", "max_output_tokens": 16}
MESSAGE = {"type": "message", "role": "user", "content": "Hi"}
ASKED: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, {"model": "tiny", "messages": [user("Hi")]}),
    "a chat stream": (CHAT, {"model": "tiny", "messages": [user("Hi")], "stream": True}),
    "messages": ("/v1/messages", {"model": "tiny", "messages": [user("Hi")], "max_tokens": 5}),
    "a response": ("/v1/responses", RESPONSE),
    "a response's stream": ("/v1/responses", RESPONSE | {"stream": True}),
    "an agent's turn": ("/v1/agents/sessions", {"agent": AGENT, "input": [MESSAGE], "stream": True}),
    "what is refused": (CHAT, {"model": 5}),
    "what is no JSON": (CHAT, "{"),
    "what there is not": ("/nothing", {}),
}


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[tuple[int, Connections]]:
    connections = Connections(WireBounds())
    protocol = bounded_protocol(WireBounds(), connections)
    settings = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", http=protocol, ws="none")
    running = uvicorn.Server(settings)
    task = asyncio.create_task(running.serve())
    try:
        await settled(lambda: running.started)
        yield running.servers[0].sockets[0].getsockname()[1], connections
    finally:
        running.should_exit = True
        await task


def request(path: str, body: Any, more: str = "connection: close") -> bytes:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def left_over() -> Iterator[Counter[str]]:
    """What of ours only the collector would have found."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(
            type(one).__qualname__ for one in gc.garbage if type(one).__module__.partition(".")[0] in OURS
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def exchange(port: int, data: bytes, *, reads: bool = True) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    told = await reader.read() if reads else await reader.read(1)
    writer.transport.abort()
    return told


async def test_requests_leave_nothing_to_the_collector() -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    async with served(rig.app) as (port, connections):

        async def all_of_them() -> None:
            for kind, (path, body) in ASKED.items():
                told = await exchange(port, request(path, body))
                assert told.startswith(b"HTTP/1.1 "), (kind, told)
            await settled(lambda: not len(connections) and not rig.engine.live)
            await settled(lambda: not len(rig.context.agents))
            await asyncio.sleep(0.01)

        await all_of_them()
        with left_over() as found:
            await all_of_them()
        assert not found


async def test_nor_do_clients_that_leave() -> None:
    """In the middle of a body, of a stream, and with requests behind the one that runs."""
    rig = Rig(ScriptedEngine(say("word " * 300)))
    stream = request(CHAT, ASKED["a chat stream"][1], "x: y")
    async with served(rig.app) as (port, connections):
        with left_over() as found:
            for data in (stream[:-5], stream, stream * 5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                await settled(lambda: len(connections) == 1)
                if data != stream[:-5]:
                    assert await reader.read(1)
                writer.transport.abort()
                await settled(lambda: not len(connections) and not rig.engine.live)
            await asyncio.sleep(0.05)
        assert not found


async def test_the_test_sees_a_cycle() -> None:
    with left_over() as found:
        connections = Connections(WireBounds())
        connections.self = connections  # type: ignore[attr-defined]
        del connections
    assert found["Connections"] == 1


async def test_an_agents_turn_with_a_tool_leaves_none() -> None:
    rig = Rig(ScriptedEngine(say(hermes("weather", "{}"))))
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    async with served(rig.app) as (port, connections):

        async def turn() -> None:
            body = {"agent": AGENT | {"tools": [tool]}, "input": [MESSAGE]}
            told = await exchange(port, request("/v1/agents/sessions", body))
            id_ = json.loads(told.partition(b"\r\n\r\n")[2])["id"]
            await settled(lambda: rig.context.agents.shelf.get("default", id_).status == "requires_action")
            path = f"/v1/agents/sessions/{id_}/events"
            await exchange(port, request(path, {"events": [{"type": "agent.session.input.cancel"}]}))
            await settled(lambda: not len(connections) and not len(rig.context.agents))
            await asyncio.sleep(0.01)

        await turn()
        with left_over() as found:
            await turn()
        assert not found
