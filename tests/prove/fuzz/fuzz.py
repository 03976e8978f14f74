"""The fuzz of a whole server: what is sent, what must not come of it, and what is left in the end."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.prove.fuzz import heavy
from tests.prove.fuzz.mutate import Known, Mutator, Route, Wire, routes
from tests.prove.fuzz.seeds import SAY, TOOL, user
from tests.prove.fuzz.slow import Slow
from tests.prove.fuzz.target import Target
from tests.prove.fuzz.wire import Heard, exchange
from tests.reply_forms import NAMES, WRITERS, alphabet

SIPS = 0.25  # seconds for which a stream without an end is read
BUSY = {"compiler_busy"}  # a 503 that says: now others keep it busy
LISTS = (  # what can be listed and deleted
    "/v1/agents/sessions", "/v1/agents", "/v1/webhook_endpoints", "/agentserve/sessions",
)  # fmt: skip
IDLE = (  # gauges that are 0 when nothing runs
    "kv_pages_live", "turns_active", "engine_running", "engine_waiting", "responses_running",
    "tier_moving_blocks", "tier_pinned_pages", "webhook_calls_pending",
)  # fmt: skip
_REQUESTS = ("RequestResponseCycle.run_asgi", "disconnected")
AGAIN = 10  # times that an honest client may find its connection closed before it has asked
SLACK = 48 << 20  # bytes by which a process may be larger than before: what allocators keep in pieces


@dataclass(frozen=True)
class Size:
    requests: int
    clients: int  # at once
    heavy: int  # of the heavy bodies, at most so many per route; 0: none
    slow: int
    slow_seconds: float
    calls: int  # half-finished tool calls per family of models
    warming: int = 50  # requests before it is looked at what is held
    warming_seconds: float = 0.0  # for which the slow clients come before that, too
    patience: float = 4.0  # seconds for a reply that may never come
    quiet_seconds: float = 0.0  # before it is looked at what is held


@dataclass
class Report:
    """What was done and what came of it."""

    seed: int
    size: dict[str, Any]
    routes: int = 0
    asked: int = 0  # of the routes: at least once
    statuses: dict[str, int] = field(default_factory=dict)
    heavy_statuses: dict[str, int] = field(default_factory=dict)
    slow_ends: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    longest_stall_told: float = 0.0  # by /metrics: seconds, whoever's fault
    longest_stall: dict[str, Any] = field(default_factory=dict)  # of the server's own fault
    stalls: list[dict[str, Any]] = field(default_factory=list)  # the worst ones

    def line(self) -> str:
        worst = self.longest_stall or {"fault": 0.0, "late": 0.0, "during": "", "where": ""}
        own = f"{worst['fault'] * 1000:.0f}"
        return (
            f"{sum(self.statuses.values())} requests over {self.asked} of {self.routes} routes "
            f"{self.statuses}, heavy {self.heavy_statuses}, slow {self.slow_ends}; longest stall "
            f"{own} ms of the server's own (late {worst['late'] * 1000:.0f} ms; longest of any cause "
            f"{self.longest_stall_told * 1000:.0f} ms) during {worst['during']}: {worst['where'][:300]}"
        )


class Fuzz:
    """One fuzz of one server."""

    def __init__(self, server: Target, size: Size, seed: int) -> None:
        self._server = server
        self._size = size
        self._rng = random.Random(seed)
        self._known = Known()
        self._statuses: Counter[str] = Counter()
        self._asked: set[tuple[str, str]] = set()
        self.report = Report(seed, asdict(size))

    async def run(self) -> Report:
        server, report = self._server, self.report
        found = routes((await server.http.get("/openapi.json")).json())
        report.routes = len(found)
        mutator = Mutator(self._rng.getrandbits(32), found, self._known)
        # A first round of the same. What is kept within bounds (texts' ids, words of the tokenizer, pages of
        # the disks' files) is filled once, and so is what allocators keep in pieces: four crowds of 500 left
        # 117, 118, 121 and 121 MiB. What grows from one round to the next is a leak.
        await self._send(mutator, self._size.warming, "warming up")
        await self._heavy(found)
        await self._slow(self._size.warming_seconds)
        report.before = await self.rest()
        server.stalls.clear()
        for name, part in (
            ("mutated", self._send(mutator, self._size.requests, "mutated")),
            ("heavy", self._heavy(found)),
            ("slow", self._slow(self._size.slow_seconds)),
        ):
            began = time.monotonic()
            await part
            await server.state(name)
            server.check()
            report.seconds[name] = round(time.monotonic() - began, 1)
        report.statuses, report.asked = dict(self._statuses), len(self._asked)
        report.longest_stall_told = (await server.metrics())["agentserve_event_loop_longest_stall_seconds"]
        report.after = await self.rest()
        report.stalls = sorted(server.stalls, key=lambda stall: -stall["fault"])[:12]
        report.longest_stall = report.stalls[0] if report.stalls else {}
        server.check()
        return report

    # --- mutated requests -------------------------------------------------------------------

    async def _send(self, mutator: Mutator, count: int, during: str) -> None:
        left = count

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                wire = mutator.next()
                heard = await exchange(
                    self._server.port, wire.data, patience=SIPS if wire.route.streams else self._size.patience
                )
                self._asked.add((wire.route.method, wire.route.path))
                self._judge(heard, repr(wire))
                self._statuses[str(heard.status)] += 1
                self._known.heard(wire.route.path, heard.json, heard.headers.get("x-session-id"))
                if left % 100 == 0:
                    await self._server.state(f"{during}, about {wire.route.path}")

        await asyncio.gather(*(client() for _ in range(self._size.clients)))

    def _judge(self, heard: Heard, what: str) -> None:
        status = heard.status
        if status is not None and status >= 500 and heard.code not in BUSY:
            raise AssertionError(f"{status} {heard.body[:500]!r} to {what}")
        if status is None and not heard.left and b"HTTP/1.1\r\n" in what.encode()[:200]:
            return  # the server closed without a word: the request could not be read
        if b'"internal_error"' in heard.body or b"Traceback" in heard.body:
            raise AssertionError(f"{heard.body[-500:]!r} to {what}")

    # --- large ones -------------------------------------------------------------------------

    async def _heavy(self, found: list[Route]) -> None:
        if not self._size.heavy:
            return
        statuses: Counter[str] = Counter()
        for route in heavy.with_bodies(found):
            bodies = list(heavy.bodies(route))
            for what, body in self._rng.sample(bodies, min(len(bodies), self._size.heavy)):
                data = heavy.request(route, self._known, self._rng, body)
                heard = await exchange(self._server.port, data, patience=60.0)
                self._judge(heard, f"{route.path}: {what}")
                statuses[str(heard.status)] += 1
                await self._server.state(f"{route.path}: {what}")
            for chunked in (False, True):
                heard = await heavy.huge(self._server.port, route, chunked=chunked)
                self._judge(heard, f"{route.path}: {heavy.HUGE} bytes")
                statuses[f"50 MB: {heard.status}"] += 1
                await self._server.state(f"{route.path}: {heavy.HUGE} bytes")
        self.report.heavy_statuses = dict(statuses)

    # --- slow ones --------------------------------------------------------------------------

    async def _slow(self, seconds: float) -> None:
        if not seconds:
            return
        crowd = Slow(self._server.port, pause=0.5)
        reply = await self._chat("Hi", session_id="s1")
        assert reply.status == 200, reply.body
        going = asyncio.create_task(crowd.crowd(self._size.slow, self._rng.getrandbits(32), seconds))
        served = again = 0
        while not going.done():  # who is not slow is served meanwhile
            heard = await self._chat(f"Hi {served}", patience=60.0)
            if heard.status is None and not heard.left and again < AGAIN:
                again += 1  # this process, which plays a thousand clients, was too slow to ask in time
                continue
            assert heard.status == 200, f"{heard}, after {served}"
            served += 1
            await self._server.state("slow clients")
            await asyncio.wait((going,), timeout=0.5)
        await going
        self.report.slow_ends = dict(sorted(crowd.ends.items())) | {
            "served meanwhile": served,
            "asked again": again,
        }
        assert served > again

    async def _chat(self, text: str, *, patience: float = 30.0, **fields: Any) -> Heard:
        body = {"model": "tiny", "messages": [user(text)], "max_tokens": 4, **fields}
        route = Route("POST", "/v1/chat/completions", body)
        data = heavy.request(route, self._known, self._rng, json.dumps(body).encode())
        return await exchange(self._server.port, data, patience=patience)

    # --- what is left -----------------------------------------------------------------------

    async def rest(self) -> dict[str, Any]:
        """Delete all that can be, wait until nothing runs, and say what is held then. Memory comes back by
        what the server does by itself in a quiet moment."""
        await self._delete()
        await self._settle()
        await asyncio.sleep(self._size.quiet_seconds)
        state = await self._server.state("resting")
        found = await self._server.metrics()
        return {
            **state,
            "worker_rss": self._server.worker_rss(),
            "workers": found["agentserve_workers"],
            **{name: found[f"agentserve_{name}"] for name in IDLE},
        }

    async def _delete(self) -> None:
        http = self._server.http
        for path in LISTS:
            while True:
                page = (await http.get(path, params={"limit": 100})).json()["data"]
                gone = 0
                for each in page:
                    gone += (await http.delete(f"{path}/{each['id']}")).status_code == 200
                if not gone:
                    break
        for path in ("/v1/responses", "/v1/conversations"):
            for name in set(self._known.of[path]):
                with suppress(Exception):
                    await http.delete(f"{path}/{name}")
        await http.post("/reset_prefix_cache")

    async def _settle(self) -> None:
        async with asyncio.timeout(120):
            while True:
                found = await self._server.metrics()
                idle = not any(found[f"agentserve_{name}"] for name in IDLE)
                if idle and found["agentserve_workers"] and await self._alone():
                    return
                await asyncio.sleep(0.2)

    async def _alone(self) -> bool:
        """Nothing but this question is being answered: whoever was slow has been ended."""
        tasks = (await self._server.state("settling"))["tasks"]
        return sum(count for name, count in tasks.items() if name in _REQUESTS) <= 1


async def half_calls(server: Target, family: str, count: int, seed: int) -> Counter[str]:
    """Replies of a model that begins calls and never ends them, made so that a parser which looks back would
    look back for ever; streamed and whole. A turn may take no longer for what its words are."""
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    call = WRITERS[family]("weather", {"city": "Oslo"})
    bits = [bit for bit in alphabet(family) if "\n" not in bit or len(bit) > 1]

    def words() -> str:
        kind = rng.randrange(5)
        if kind == 0:
            return call[: rng.randint(1, len(call) - 1)] * rng.randint(1, 40)
        if kind == 1:
            return rng.choice(bits) * 300
        if kind == 2:
            return "".join(rng.choice(bits) for _ in range(120))
        if kind == 3:
            return call[: rng.randint(1, len(call))] + '{"a":' * 200 + '"' + "\\" * 101
        return call[:-1] + " " * 900 + call[: len(call) // 2]

    for _ in range(count):
        body = {
            "model": "tiny",
            "messages": [user(SAY + words()[:1800])],
            "tools": [TOOL],
            "max_tokens": 900,
            "stream": rng.random() < 0.5,
        }
        reply = await server.http.post("/v1/chat/completions", json=body)
        assert reply.status_code in (200, 400), (family, body, reply.text)
        assert "internal_error" not in reply.text, (family, body, reply.text)
        ends[str(reply.status_code)] += 1
        if reply.status_code == 200 and not body["stream"]:
            ends["tokens"] += reply.json()["usage"]["completion_tokens"]
            ends["whole"] += 1
        await server.state(f"half calls of {family}")
    assert ends["tokens"] > 100 * ends["whole"] > 0, (family, ends)  # it did say what it was told to say
    return ends


def check(report: Report) -> None:
    """What must hold of every run, however busy the machine is."""
    assert report.asked == report.routes, report.line()
    before, after = report.before, report.after
    for name in IDLE:
        assert after[name] == 0, (name, report.line())
    assert after["workers"] == before["workers"]
    assert after["background"] == 0
    assert sum(after["tasks"].values()) <= sum(before["tasks"].values()) + 2, (before, after)
    assert after["fds"] <= before["fds"] + 8, (before, after)
    assert after["threads"] <= before["threads"] + 40, (before, after)  # pools fill up when first used
    # Pages of mapped files (databases, libraries) are the system's cache: it takes them back unasked.
    for of in ("own", "rss_of_files"):
        assert after[of] <= before[of] + SLACK, (of, before, after)
    assert after["worker_rss"] <= before["worker_rss"] + SLACK, (before, after)


__all__ = ["NAMES", "Fuzz", "Report", "Size", "Wire", "check", "half_calls"]
