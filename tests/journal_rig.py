"""An application over a made-up disk, and what its tests have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentserve.clock import VirtualClock
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.events import EventLogs
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.transcript import Transcripts
from tests.api_rig import TOOLS, Rig, hermes, user
from tests.fakes import ScriptedEngine, say
from tests.session_stores import MemoryStore

CALL = hermes("weather", '{"city": "Oslo"}')
FULL = "No space left on device"


class Kept:
    """An application over a made-up disk, started `passed` seconds after the first one."""

    def __init__(
        self,
        store: Any = None,
        text: bytes = b"text",
        passed: float = 0.0,
        patience: float = 30.0,
        **options: Any,
    ) -> None:
        """`store`: a MemoryStore, or a SessionStore."""
        self.store = store or MemoryStore()
        clock = VirtualClock(50.0 + 7 * passed)  # monotonic clocks begin anywhere
        self.journal = Journal(self.store, text, clock, lambda: 1e9 + passed, patience)
        self.directory = SessionDirectory(new_session_id, max_wait=100.0, book=self.journal)
        self.directory.restore(self.journal.sessions(), clock.now())
        self.directory.end_waits(clock.now())
        transcripts = Transcripts()
        transcripts.on_drop = self.journal.drop_words
        for transcript in self.journal.transcripts:
            transcripts.restore(transcript)
        self.journal.words_of = transcripts.export
        self.rig = Rig(
            ScriptedEngine(say("Hello!")),
            directory=self.directory,
            journal=self.journal,
            clock=clock,
            chronicle=Chronicle(transcripts, EventLogs(lambda: "epoch")),
            **options,
        )

    async def close(self) -> None:
        if isinstance(self.store, MemoryStore):
            self.store.error = ""
            self.store.open.set()
        await self.journal.close()


@asynccontextmanager
async def kept(store: Any = None, **options: Any) -> AsyncIterator[Kept]:
    made = Kept(store, **options)
    try:
        yield made
    finally:
        await made.close()
        assert made.store.closed


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def turns_on(store: MemoryStore) -> int:
    return sum(table is Table.TURNS for table, _ in store.records)


TWO = CALL + hermes("now", "{}")


async def waiting(k: Kept) -> tuple[str, list[str]]:
    """A session that waits for two results: its path, and the calls."""
    k.rig.engine.reply = say(TWO)
    reply = await k.rig.chat([user("a")], session_id="mine", tools=TOOLS)
    k.rig.engine.reply = say("done")
    calls = reply["choices"][0]["message"]["tool_calls"]
    return "/agentserve/sessions/mine/tool_results", [call["id"] for call in calls]
