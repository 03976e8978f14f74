"""A server with agents that can be killed at any moment and started again on what was on its disks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from agentserve.clock import VirtualClock
from agentserve.server.agents.shelf import Shelf
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.events import EventLogs
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.transcript import Transcripts
from agentserve.server.sessions.writer import Failure
from agentserve.tools import Tool
from tests.agents_rig import Agent
from tests.api_rig import Rig
from tests.fakes import ScriptedEngine
from tests.session_stores import MemoryStore


class _Write(Future[None]):
    """Somebody who waits for it makes it, and all before it, lasting."""

    def __init__(self, awaited: Callable[[], None]) -> None:
        super().__init__()
        self._awaited = awaited

    def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
        self._awaited()
        super().add_done_callback(fn)


class MemoryBook:
    """Records of agents in memory, and the order in which they were written."""

    def __init__(self, records: Mapping[str, bytes] | None = None) -> None:
        self.records = dict(records or {})
        self.error: Exception | None = None
        self._start = dict(self.records)
        self._writes: list[tuple[str, bytes | None]] = []
        self._lasting = 0  # writes that somebody has waited for

    def put(self, name: str, content: bytes) -> Future[None]:
        self.records[name] = content
        return self._written(name, content)

    def drop(self, name: str) -> Future[None]:
        self.records.pop(name, None)
        return self._written(name, None)

    async def close(self) -> None:
        """Nothing is held."""

    @property
    def failure(self) -> Failure | None:
        return None if self.error is None else Failure(1e9, str(self.error))

    def without(self, last: int) -> dict[str, bytes]:
        """The records without the last writes, but with those that somebody has waited for."""
        records = dict(self._start)
        for name, content in self._writes[: max(self._lasting, len(self._writes) - last)]:
            if content is None:
                records.pop(name, None)
            else:
                records[name] = content
        return records

    def _written(self, name: str, content: bytes | None) -> Future[None]:
        self._writes.append((name, content))
        place = len(self._writes)

        def awaited() -> None:
            self._lasting = max(self._lasting, place)

        done = _Write(awaited)
        done.set_running_or_notify_cancel()
        if self.error is None:
            done.set_result(None)
        else:
            done.set_exception(self.error)
        return done


class Sleeper:
    """Time for tools: it passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1e9
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    def wall(self) -> float:
        return self.now

    @property
    def asleep(self) -> int:
        """How many sleep now."""
        return sum(not waiting.done() for _, waiting in self._sleeping)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append((self.now + seconds, waiting))
        await waiting

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        for at, waiting in self._sleeping:
            if at <= self.now and not waiting.done():
                waiting.set_result(None)


class Machine:
    def __init__(
        self,
        engine: ScriptedEngine,
        tools: Mapping[str, Tool] | None = None,
        mcp: Any = None,
        **options: Any,
    ) -> None:
        """`options`: of each of its applications."""
        self.options = options
        self.engine = engine
        self.tools = tools
        self.mcp = mcp
        self.time = Sleeper()
        self.store = MemoryStore()
        self.book = MemoryBook()
        self.rig, self.journal = self._started()

    def _started(self) -> tuple[Rig, Journal]:
        clock = VirtualClock(50.0)
        journal = Journal(self.store, b"text", clock, lambda: 1e9)  # type: ignore[arg-type]
        directory = SessionDirectory(new_session_id, max_wait=100.0, book=journal)
        directory.restore(journal.sessions(), clock.now())
        transcripts = Transcripts()
        transcripts.on_drop = journal.drop_words
        for transcript in journal.transcripts:
            transcripts.restore(transcript)
        journal.words_of = transcripts.export
        shelf = Shelf(book=self.book)
        assert shelf.restore(dict(self.book.records)) == 0
        rig = Rig(
            self.engine,
            directory=directory,
            journal=journal,
            clock=clock,
            chronicle=Chronicle(transcripts, EventLogs(lambda: "epoch")),
            agents=shelf,
            tools=self.tools,
            mcp=self.mcp,
            sleep=self.time.sleep,
            wall=self.time.wall,
            **self.options,
        )
        return rig, journal

    async def kill(self, agent: Agent, lost: int = 0) -> Agent:
        """`kill -9`, and a start: what was written is there, nothing else, and of the agents' records not the
        last `lost` that nobody waited for. The same session."""
        await self.restart(lost)
        return Agent(self.rig, {"id": agent.id})

    async def restart(self, lost: int = 0) -> None:
        disk = dict(self.store.records)
        records = self.book.without(lost) if lost else dict(self.book.records)
        await self.rig.context.agents.stop()  # as far as the disk can tell, it never came to that
        await self.journal.close()
        self.store, self.book = MemoryStore(), MemoryBook(records)
        self.store.records = disk
        self.engine.live.clear()
        self.rig, self.journal = self._started()
        self.rig.context.agents.resume()

    async def close(self) -> None:
        await self.rig.context.agents.stop()
        await self.journal.close()


def shown(items: list[dict[str, Any]]) -> list[Any]:
    """Items without what is drawn at random."""
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id", "turn_id")}
        for item in items
    ]
