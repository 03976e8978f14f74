"""What clients know of a server that dies and comes back, and what they have been told by it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from tests.sse import Sent, sent

LIMIT = 120.0  # seconds until a wait is called a hang
SESSIONS = "/agentserve/sessions"

Result = TypeVar("Result")


@dataclass
class Told:
    """What the server has acknowledged of one session."""

    turns: int
    waiting: bool  # for results
    results: set[str] = field(default_factory=set)  # those that have a receipt
    finished: bool = False  # a further turn's stream broke off after its last piece


class World:
    """One server over its lives. Clients take its address from here, before each request."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.life = 0
        self.url = ""
        self.going = True  # clients begin something new
        self.leaving = False  # the server was asked to
        self.events = 0  # pieces of streams, events of sessions, replies
        self.told: dict[str, Told] = {}
        self.names: set[str] = set()  # of all sessions there ever were
        self.closed: set[str] = set()  # of those that the server has said to be closed
        self.repeats = 0  # requests that were sent again after a death
        self.recovered = 0  # of these, turns that were on disk although no client had been told
        self.resumed = 0  # event streams that were taken up again after a death
        self._begun = asyncio.Event()
        self._followers: list[asyncio.Task[None]] = []

    # --- lives ----------------------------------------------------------------------------

    def up(self, url: str) -> None:
        """A life begins."""
        self.life += 1
        self.leaving = False
        self.url = url
        begun, self._begun = self._begun, asyncio.Event()
        begun.set()

    def saw(self) -> None:
        """Something came from the server."""
        self.events += 1

    async def after(self, life: int) -> None:
        """Wait until a later life has begun."""
        async with asyncio.timeout(LIMIT):
            while self.life <= life:
                await self._begun.wait()

    async def surely(self, attempt: Callable[[int], Awaitable[Result]]) -> Result:
        """Try until no death comes in between; `attempt` is told how often it was tried before."""
        tries = 0
        while True:
            life = self.life
            try:
                done = await attempt(tries)
            except httpx.TransportError:
                tries += 1
                self.repeats += 1
                await self.after(life)
            else:
                self.saw()
                return done

    # --- requests -------------------------------------------------------------------------

    async def get(self, path: str) -> Any:
        reply = await self.http.get(self.url + path)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}"
        return reply.json()

    async def close(self, name: str) -> None:
        async def attempt(tries: int) -> None:
            reply = await self.http.delete(f"{self.url}{SESSIONS}/{name}")
            assert reply.status_code == 200 or (tries and reply.status_code == 404), reply.text

        self.told.pop(name, None)  # until the answer is here it may be there or not
        await self.surely(attempt)
        self.closed.add(name)

    # --- sessions -------------------------------------------------------------------------

    def know(self, name: str, told: Told) -> None:
        self.told[name] = told
        self.names.add(name)

    def follow(self, name: str) -> None:
        """Read the session's events until it is closed, whatever dies meanwhile."""
        self._followers.append(asyncio.create_task(_Follower(self, name).run()))

    def check_followers(self) -> None:
        """Raise what they found."""
        ended = [task for task in self._followers if task.done()]
        self._followers = [task for task in self._followers if not task.done()]
        for task in ended:
            task.result()

    async def end(self) -> None:
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)


class _Follower:
    """Each event once and in order; the deltas of a turn add up to its text."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._last = ""
        self._texts: dict[int, str] = {}  # of turns that were seen from their beginning

    async def run(self) -> None:
        world = self._world
        while True:
            life = world.life
            with suppress(httpx.TransportError):
                if await self._read():
                    return
            await world.after(life)
            world.resumed += 1

    async def _read(self) -> bool:
        """True when the session is no more."""
        headers = {"last-event-id": self._last} if self._last else {}
        url = f"{self._world.url}{SESSIONS}/{self._name}/events"
        async with self._world.http.stream("GET", url, headers=headers) as reply:
            if reply.status_code == 404:
                return True
            assert reply.status_code == 200
            async for event in sent(reply.aiter_raw()):
                self._world.saw()
                self._take(event)
                if event.kind == "closed":
                    return True
        assert self._world.leaving, "a session's events ended, and it was not closed"
        return False

    def _take(self, event: Sent) -> None:
        log, number = event.id.rpartition("-")[0], event.number
        if event.kind == "gap":  # of what an earlier life had said nothing is kept
            assert self._last.rpartition("-")[0] != log, "a gap in one life's events"
            assert event.data["lost"] is None
            self._texts.clear()
        elif self._last:
            before = self._last.rpartition("-")
            assert (before[0], int(before[2]) + 1) == (log, number), f"{event.id} after {self._last}"
        self._last = event.id
        turn = event.data.get("turn")
        if event.kind == "turn_started":
            self._texts[turn] = ""
        elif event.kind == "delta" and turn in self._texts:
            self._texts[turn] += event.data.get("content", "")
        elif event.kind == "turn_rolled_back":
            self._texts.pop(turn, None)
        elif event.kind == "turn_completed" and turn in self._texts:
            assert self._texts.pop(turn) == event.data["content"], "deltas are not what was completed"
