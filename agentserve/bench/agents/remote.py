"""The same agents against any server that speaks OpenAI's chat completions, over HTTP, as text.

Each session is one client: it streams a reply, waits as its tools do, appends what they found and asks
again. Results come as user messages, since a model that says what it likes makes no tool calls. What a
peer does not know (sessions, hints, signals, closing) is left out, so that every server gets the same.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from agentserve.bench.agents.summary import Turn
from agentserve.bench.agents.words import text_of
from agentserve.sim.traces.agents import Agent
from agentserve.sim.traces.draw import TraceSpec, bursts, draw_agent

Messages = list[dict[str, str]]


class Peer(msgspec.Struct, frozen=True):
    """The server. `url` ends in /v1; `min_tokens`: also ask that no reply ends early, where that is known."""

    url: str
    model: str
    api_key: str = ""
    min_tokens: bool = False
    timeout: float = 600.0  # seconds that one reply may take


class TurnFailed(ValueError):
    """The server refused a turn or its reply broke off; one line."""


@dataclass
class RemoteRun:
    """One run of the first `agents` agents of a spec, at most `lanes` at once."""

    peer: Peer
    spec: TraceSpec
    lanes: int
    agents: int
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Any] = asyncio.sleep
    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def run(self, transport: httpx.AsyncBaseTransport | None = None) -> float:
        """Plays all agents and returns how many seconds that took. transport: in place of the network."""
        headers = {"accept-encoding": "identity"}
        if self.peer.api_key:
            headers["authorization"] = f"Bearer {self.peer.api_key}"
        limits = httpx.Limits(max_connections=None)
        began = self.now()
        async with httpx.AsyncClient(
            headers=headers, timeout=self.peer.timeout, limits=limits, transport=transport
        ) as client:
            free = asyncio.Semaphore(self.lanes)
            async with asyncio.TaskGroup() as group:
                for burst in bursts(self.spec, self.lanes):
                    if burst.first >= self.agents:
                        break
                    await self.sleep(burst.gap)
                    members = range(burst.first, min(burst.first + burst.size, self.agents))
                    for _ in members:  # a burst starts when there is room for all of it
                        await free.acquire()
                    for number in members:
                        group.create_task(self._in_lane(client, free, draw_agent(self.spec, number)))
        return self.now() - began

    async def _in_lane(self, client: httpx.AsyncClient, free: asyncio.Semaphore, agent: Agent) -> None:
        system = {"role": "system", "content": text_of(agent.prefix)}
        try:
            await self._play(client, agent, [system, {"role": "user", "content": text_of(agent.task)}])
        finally:
            free.release()

    async def _play(self, client: httpx.AsyncClient, agent: Agent, messages: Messages) -> None:
        """One session to its end; it ends early when a turn fails. A sub-agent gets its parent's messages."""
        for number, turn in enumerate(agent.turns):
            if turn.summary is not None:
                messages = [messages[0], {"role": "user", "content": text_of(turn.summary)}]
            resumed = number > 0 and turn.summary is None
            try:
                reply = await self._turn(client, messages, turn.output, resumed)
            except (TurnFailed, httpx.HTTPError, OSError) as error:
                self.errors.append(f"{agent.name}: {type(error).__name__}: {error}".splitlines()[0])
                return
            messages.append({"role": "assistant", "content": reply})
            if not turn.calls or all(math.isinf(call.wait) for call in turn.calls):
                return
            children = [
                self._play(
                    client, call.child, [*messages, {"role": "user", "content": text_of(call.child.task)}]
                )
                for call in turn.calls
                if call.child is not None
            ]
            waits = [call.wait for call in turn.calls if call.child is None]
            await asyncio.gather(self.sleep(max(waits, default=0.0)), *children)
            results = (f"Result of {call.tool}: {text_of(call.result)}" for call in turn.calls)
            messages.append({"role": "user", "content": "\n".join(results)})

    async def _turn(self, client: httpx.AsyncClient, messages: Messages, output: int, resumed: bool) -> str:
        body: dict[str, Any] = {
            "model": self.peer.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
        }
        if self.peer.min_tokens:
            body["min_tokens"] = output
        sent, marks, pieces, usage = self.now(), [], [], {}  # type: ignore[var-annotated]
        async for event in self._events(client, body):
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                piece = (choice.get("delta") or {}).get("content")
                if piece:
                    marks.append(self.now())
                    pieces.append(piece)
        ended = self.now()
        details = usage.get("prompt_tokens_details") or {}
        self.turns.append(
            Turn(
                resumed=resumed,
                ttft=(marks[0] if marks else ended) - sent,
                seconds=ended - sent,
                prompt=int(usage.get("prompt_tokens") or 0),
                cached=int(details.get("cached_tokens") or 0),
                generated=int(usage.get("completion_tokens") or len(marks)),
                gaps=tuple(later - earlier for earlier, later in pairwise(marks)),
            )
        )
        return "".join(pieces)

    async def _events(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The reply's server-sent events. Raises TurnFailed unless they end as they should."""
        url = f"{self.peer.url.rstrip('/')}/chat/completions"
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode("utf-8", "replace")
                raise TurnFailed(f"status {response.status_code}: {said[:200]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                try:
                    event = json.loads(data)
                except ValueError as error:
                    raise TurnFailed(f"no JSON in its stream: {data[:100]}") from error
                if "error" in event:
                    raise TurnFailed(str(event["error"])[:200])
                yield event
            raise TurnFailed("its stream broke off")
