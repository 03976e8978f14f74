"""A contestant behind an OpenAI server: the same streaming client against every one of them."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from agentserve.bench.compare.child import Child
from agentserve.bench.compare.plan import WARM_UP, Scenario, text_prompts
from agentserve.bench.compare.result import Facts, Figure

MODEL = "m"  # what both servers call theirs
POLL_SECONDS = 0.2
ENDING_SECONDS = 2.0  # between a connection's end and its server's


class BrokenStream(ValueError):
    """A reply that holds an error, or ends too early; one line."""


@dataclass
class Stream:
    """One reply as it came: when it was asked for, and how many tokens there were at which time."""

    sent: float
    marks: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, sent: float, pieces: Sequence[tuple[float, bytes]]) -> Stream:
        """Read server-sent events from the pieces that came, each with its time. Raises BrokenStream."""
        stream, unread = cls(sent), b""
        for now, piece in pieces:
            *lines, unread = (unread + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                if line.strip().endswith(b"[DONE]"):
                    return stream
                event = json.loads(line[5:])
                if "error" in event:
                    raise BrokenStream(str(event["error"])[:200])
                if event.get("usage"):
                    stream.heard(now, event["usage"])
        raise BrokenStream("its stream broke off")

    def heard(self, now: float, usage: Mapping[str, Any]) -> None:
        tokens = int(usage.get("completion_tokens") or 0)
        if tokens > self.tokens:
            self.marks.append((now, tokens))
        self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = int(details.get("cached_tokens") or 0)

    @property
    def tokens(self) -> int:
        return self.marks[-1][1] if self.marks else 0


def decode_rate(streams: Sequence[Stream]) -> float | None:
    """Tokens per second over all streams while all of them decode: from the last one's first token to
    the first one's last. None if there was no such time."""
    begin = max(stream.marks[0][0] for stream in streams)
    end = min(stream.marks[-1][0] for stream in streams)
    if end <= begin:
        return None
    given = sum(_tokens_at(stream, end) - _tokens_at(stream, begin) for stream in streams)
    return given / (end - begin)


def prefill_rate(streams: Sequence[Stream]) -> float:
    """Prompt tokens per second until every stream has its first token."""
    seconds = max(stream.marks[0][0] for stream in streams) - min(stream.sent for stream in streams)
    return sum(stream.prompt_tokens for stream in streams) / seconds


def _tokens_at(stream: Stream, when: float) -> int:
    return max((tokens for at, tokens in stream.marks if at <= when), default=0)


class Served:
    """A server that is ready. Raises PeerFailed when it refuses, hangs, ends early or is gone."""

    def __init__(self, child: Child, url: str, facts: Facts, limit: float) -> None:
        """`limit`: seconds that one run may take."""
        self.facts = facts
        self._child = child
        self._url = url
        self._limit = limit

    def warm_up(self, scenario: Scenario) -> None:
        # The first streams may end before the last one's prefill: there is no rate to be had.
        self._replies(scenario.shortened(), WARM_UP)

    def run(self, scenario: Scenario, number: int) -> Figure:
        streams = self._replies(scenario, number)
        rate = prefill_rate(streams) if scenario.kind == "prefill" else decode_rate(streams)
        if rate is None:
            raise self._child.failed(f"{scenario.name}: its {scenario.rows} streams never ran together")
        return Figure(rate, sum(stream.prompt_tokens for stream in streams))

    def cpu_seconds(self) -> float:
        return self._child.cpu_seconds()

    def hold(self, held: bool) -> None:
        self._child.hold(held)

    def _replies(self, scenario: Scenario, number: int) -> list[Stream]:
        """One run's replies: whole, and of prompts that no cache knew."""
        streams = asyncio.run(self._streams(scenario, text_prompts(scenario, number)))
        for stream in streams:
            if stream.tokens != scenario.tokens:
                raise self._child.failed(
                    f"{scenario.name}: {stream.tokens} of {scenario.tokens} tokens, in spite of ignore_eos"
                )
            if stream.cached_tokens * 10 > stream.prompt_tokens:
                raise self._child.failed(f"{scenario.name}: {stream.cached_tokens} prompt tokens were cached")
        return streams

    async def _streams(self, scenario: Scenario, prompts: Sequence[str]) -> list[Stream]:
        headers = {"accept-encoding": "identity"}
        try:
            async with (
                asyncio.timeout(self._limit),
                httpx.AsyncClient(timeout=None, headers=headers) as client,
            ):
                replies = [self._reply(client, prompt, scenario) for prompt in prompts]
                return [Stream.of(sent, pieces) for sent, pieces in await asyncio.gather(*replies)]
        except TimeoutError:
            raise self._child.failed(f"{scenario.name}: no answer in {self._limit:g} s") from None
        except (httpx.HTTPError, ValueError) as error:
            what = str(error) or type(error).__name__
            raise self._child.failed(f"{scenario.name}: {what}", wait=ENDING_SECONDS) from None

    async def _reply(
        self, client: httpx.AsyncClient, prompt: str, scenario: Scenario
    ) -> tuple[float, list[tuple[float, bytes]]]:
        """When it was asked for, and what came when. It is read later: reading would take the cores away
        from the server, and most from the fastest."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": scenario.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            # A piece may bring several tokens, or none: only the running count says.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        pieces: list[tuple[float, bytes]] = []
        sent = time.perf_counter()
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                said = (await reply.aread()).decode(errors="replace")
                raise self._child.failed(f"{scenario.name}: HTTP {reply.status_code}: {said[:200]}")
            async for piece in reply.aiter_raw():
                pieces.append((time.perf_counter(), piece))
        return sent, pieces


def wait_ready(child: Child, url: str, limit: float) -> str:
    """Return when the server answers /health with 200: its version. PeerFailed if it ends before, or
    `limit` seconds pass."""
    until = time.monotonic() + limit
    with httpx.Client(base_url=url, timeout=5.0) as client:
        while True:
            if child.ended:
                raise child.failed("it ended before it was ready")
            try:
                if client.get("/health").status_code == 200:
                    return str(client.get("/version").json()["version"])
            except httpx.HTTPError:
                pass  # the port is not open yet
            except (ValueError, LookupError, TypeError):
                raise child.failed("its /version has no version") from None
            if time.monotonic() > until:
                raise child.failed(f"not ready after {limit:g} s")
            time.sleep(POLL_SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
