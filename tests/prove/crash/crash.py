"""A campaign: agents at work, and again and again `kill -9`, at a named point or at any moment.

Between two deaths there is a rest: what was cut off is finished by its clients, then nothing may run, be
pinned or be under way, and every session must be where its client was told it is.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.prove.crash.agents import Agent
from tests.prove.crash.book import Book, Sizes, Unsuitable
from tests.prove.crash.machine import Machine
from tests.prove.crash.points import SERVER, WORKER, Point
from tests.prove.crash.report import Report
from tests.prove.crash.world import LIMIT, SESSIONS, World

BOTH = "both"
VICTIMS = (WORKER, SERVER, BOTH)
MOST_WORKER_DEATHS = 3  # in one life of a server, which gives a worker up after five
QUIET = (
    "turns_active",
    "engine_running",
    "engine_waiting",
    "kv_pages_live",
    "tier_moving_blocks",
    "tier_pinned_pages",
)


@dataclass(frozen=True)
class Plan:
    """What a campaign does: `flags` are the server's."""

    flags: dict[str, Any]
    sizes: Sizes
    points: Sequence[Point]  # one kill each, in this order
    random_kills: int
    agents: int = 6
    scripts: int = 12
    seed: int = 1
    gap: int = 150  # events between two random kills, at most


class Campaign:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._book = Book()
        self._scripts: list[int] = []
        self._machine = Machine(folder / "crash", plan.flags)
        self._begun = 0
        self._agents: list[AsyncIterator[None] | None] = [None] * plan.agents
        self.report = Report(model=Path(plan.flags.get("model", "smollm2-135m")).name, seed=plan.seed)

    async def run(self) -> Report:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        began = asyncio.get_running_loop().time()
        async with httpx.AsyncClient(timeout=LIMIT, limits=limits) as http:
            await self._undisturbed(World(http))
            world = World(http)
            try:
                await self._start(world)
                for point in self._plan.points:
                    await self._named(world, point)
                for number in range(self._plan.random_kills):
                    await self._random(world, VICTIMS[number % len(VICTIMS)])
                await self._moved(world)
                world.leaving = True
                await self._machine.stop()
            finally:
                await world.end()
                await self._machine.destroy()
        told, book = self.report, self._book
        told.hits = Counter(self._machine.hits())
        told.turns, told.ids, told.server_starts = book.turns, book.ids, self._machine.starts
        told.repeats, told.recovered, told.resumed = world.repeats, world.recovered, world.resumed
        told.seconds = asyncio.get_running_loop().time() - began
        return told

    async def _undisturbed(self, world: World) -> None:
        """Every script once, alone, on a server that keeps nothing and that nobody kills."""
        without = {"host_kv": "0", "disk_kv": "0", "device_kv": "64MiB"}
        machine = Machine(self._folder / "calm", self._plan.flags | without, durable=False)
        try:
            url = await machine.start()
            assert url is not None, machine.log()
            world.up(url)
            seed = 0
            while len(self._scripts) < self._plan.scripts:
                seed += 1
                book = Book()
                try:
                    async for _ in Agent(world, book, self._plan.sizes, seed, f"calm{seed}", "calm").acts():
                        pass
                except Unsuitable:
                    assert seed < 20 * self._plan.scripts, "the model plays along with no script"
                    continue
                self._book.said |= book.said
                self._scripts.append(seed)
            await world.end()
            await machine.stop()
        finally:
            await machine.destroy()
        self._book.closed = True

    # --- deaths ---------------------------------------------------------------------------

    async def _named(self, world: World, point: Point) -> None:
        if point.process == WORKER and self._machine.worker_deaths >= MOST_WORKER_DEATHS:
            await self._again(world)
        if point.start:
            return await self._at_start(world, point)
        order = self._machine.arm(point, self._rng.randint(1, point.most))
        await self._until(world, point.process, lambda: self._machine.hit(order), point.name)

    async def _at_start(self, world: World, point: Point) -> None:
        """A process dies while it starts, after one that died at any moment."""
        self.report.others += 1
        at = world.events + self._rng.randint(1, self._plan.gap)
        orphan = point.name == "disk.adopt"
        order = 0

        def prepare() -> None:
            nonlocal order
            if orphan:
                self._machine.orphan()
            order = self._machine.arm(point, 1)

        victim = SERVER if point.process == SERVER or orphan else WORKER
        await self._until(world, victim, lambda: world.events >= at, point.name, prepare)
        assert self._machine.hit(order), f"{point.name} was not passed"
        if victim == WORKER:
            self._machine.worker_deaths += 1  # of the one that came after

    async def _random(self, world: World, victim: str) -> None:
        if victim == WORKER and self._machine.worker_deaths >= MOST_WORKER_DEATHS:
            await self._again(world)
        at = world.events + self._rng.randint(1, self._plan.gap)
        await self._until(world, victim, lambda: world.events >= at, f"event {at}", kill=True)
        self.report.random_kills[victim] += 1

    async def _until(
        self,
        world: World,
        victim: str,
        reached: Callable[[], bool],
        what: str,
        prepare: Callable[[], None] | None = None,
        *,
        kill: bool = False,
    ) -> None:
        """Agents work until it is reached; then somebody is dead, comes back, and all is as it was told."""
        with (self._folder / "kills").open("a") as kills:  # what to look at where one of them goes wrong
            kills.write(f"{victim} at {what}, after {world.events} events and {self._book.turns} turns\n")
        world.going = True
        worker = self._machine.worker
        working = [asyncio.create_task(self._work(world, slot)) for slot in range(self._plan.agents)]
        try:
            await self._reached(world, working, reached, what)
            world.going = False
            if prepare is not None or kill:
                self._machine.kill(server=victim != WORKER, worker=victim != SERVER)
                if victim != WORKER:
                    await self._machine.dead()
                if prepare is not None:
                    prepare()
            elif victim == WORKER:
                self._machine.worker_deaths += 1
            if victim != WORKER:
                await self._start(world)
            else:
                await self._replaced(worker)
            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        await self._rest(world)

    async def _reached(
        self, world: World, working: Sequence[asyncio.Task[None]], reached: Callable[[], bool], what: str
    ) -> None:
        async with asyncio.timeout(LIMIT):
            while not reached():
                for task in working:
                    if task.done():
                        task.result()
                        raise AssertionError("an agent left off")
                await asyncio.sleep(0.002)

    async def _start(self, world: World) -> None:
        """Start the server, again if it died at once, and look whether it knows what it said before."""
        if world.life:
            await self._machine.dead()
        while True:
            if world.life:
                self.report.records += self._machine.inspect()
            url = await self._machine.start()
            if url is not None:
                break
            assert await self._machine.dead() in (-9, 1), self._machine.log()
        if world.life:
            listed = await self._listed(world, url)  # no client knows this address yet
            assert not world.closed & listed.keys(), "a session that was closed is back"
            for name, told in world.told.items():
                assert name in listed, f"session {name} is lost"
                turns = listed[name]["turns"]
                least = told.turns + told.finished
                assert turns in (least, told.turns + 1), f"{name}: {turns} turns, {least} were told"
        world.up(url)

    async def _replaced(self, worker: int | None) -> None:
        async with asyncio.timeout(LIMIT):
            while self._machine.worker in (worker, None):  # noqa: ASYNC110  (another process's doing)
                await asyncio.sleep(0.01)

    async def _again(self, world: World) -> None:
        """Stop the server as an operator does; it has nothing to do."""
        world.leaving = True
        await self._machine.stop()
        await self._start(world)

    # --- agents ---------------------------------------------------------------------------

    async def _work(self, world: World, slot: int) -> None:
        while world.going:
            if self._agents[slot] is None:
                script = self._scripts[self._begun % len(self._scripts)]
                self._begun += 1
                name = f"agent{self._begun}"
                agent = Agent(world, self._book, self._plan.sizes, script, name, name)
                self._agents[slot] = agent.acts()
            acts = self._agents[slot]
            assert acts is not None
            if await anext(acts, "over") == "over":
                self._agents[slot] = None

    # --- rest -----------------------------------------------------------------------------

    async def _rest(self, world: World) -> None:
        """Nothing runs, nothing is held, and what clients were told is so, and no more."""
        await self._quiet(world)
        world.check_followers()
        listed = await self._listed(world, world.url)
        assert not world.closed & listed.keys(), "a session that was closed is there"
        for name, session in listed.items():
            if name not in world.told:  # made, and its maker was not told; it asked again
                assert session["parent"] in world.names, f"a session that nobody opened: {session}"
                await world.close(name)
        for name, told in world.told.items():
            assert name in listed, f"session {name} is lost"
            session = listed[name]
            state = "WAITING_TOOL" if told.waiting else "IDLE"
            found = (session["turns"], session["state"], session["running_turn"])
            assert found == (told.turns, state, None), f"{name}: {found}, told {told}"
            if told.results:
                view = await world.get(f"{SESSIONS}/{name}")
                taken = {call["id"] for call in view["pending_tool_calls"] if call["result_taken"]}
                assert told.results <= taken, f"{name}: results are lost"
        health = await world.get("/health")
        assert health["status"] == "ok", health
        kept = health["sessions_disk"]
        assert (kept["state"], kept["skipped"]) == ("ok", 0), health
        assert {tier["state"] for name, tier in health["tiers"].items() if name != "policy"} == {"ok"}, health
        alarms = self._machine.alarms()
        assert not alarms, alarms

    async def _quiet(self, world: World) -> None:
        busy: dict[str, float] = {}
        try:
            async with asyncio.timeout(LIMIT):
                while True:
                    values = await self._metrics(world)
                    busy = {name: values.get(name, 0.0) for name in QUIET}
                    tasks = await world.get("/tasks")
                    if values["workers"] and not any(busy.values()) and not tasks["background"]:
                        return
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"something does not end: {busy}") from None

    @staticmethod
    async def _metrics(world: World) -> dict[str, float]:
        text = (await world.http.get(world.url + "/metrics")).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("agentserve_")]
        return {name.removeprefix("agentserve_"): float(value) for name, value in lines}

    @staticmethod
    async def _listed(world: World, url: str) -> dict[str, dict[str, Any]]:
        reply = await world.http.get(f"{url}{SESSIONS}?limit=1000")
        assert reply.status_code == 200, reply.text
        return {session["id"]: session for session in reply.json()["data"]}

    async def _moved(self, world: World) -> None:
        for name, value in (await self._metrics(world)).items():
            if name.startswith(("tier_moved_blocks_total", "tier_hit_tokens_total")):
                self.report.moved[name.removeprefix("tier_")] += int(value)


def crash(folder: Path, plan: Plan) -> Report:
    return asyncio.run(Campaign(folder, plan).run())
