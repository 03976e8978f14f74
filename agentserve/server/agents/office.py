"""All agents' turns of a server: who has one, beginning and ending them, and after a restart going on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from agentserve.server.agents.driver import Driver
from agentserve.server.agents.history import History
from agentserve.server.agents.means import Means
from agentserve.server.agents.ports import Line
from agentserve.server.agents.records import CallItem, Item, OutputItem, Turn, UserItem
from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.agents.shelf import SPARE
from agentserve.server.agents.texts import user_message
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.errors import SessionClosed

MOST_RUNNING = 1024  # turns at once


class Busy(Exception):
    """The session has a turn."""


class TooManyTurns(Exception):
    """As many turns run as may: no connection bounds them."""

    def __init__(self, own: int | None) -> None:
        """own: so many are the tenant's own, and it may have no more; None: no place is left."""
        super().__init__()
        self.own = own


class Office:
    def __init__(self, means: Means, lines: Callable[[History], Line]) -> None:
        self.means = means
        self.shelf = means.shelf
        self._lines = lines
        self._drivers: dict[str, Driver] = {}
        self._starting: dict[str, asyncio.Future[None]] = {}  # turns that are being begun

    def __len__(self) -> int:
        """How many turns there are that are not over."""
        return len(self._drivers)

    def driver(self, history: History) -> Driver | None:
        return self._drivers.get(history.id)

    async def ask(self, history: History, messages: Sequence[Sequence[str]], key: str | None = None) -> Turn:
        """A turn on what a user says, the texts of each message. When this returns it runs, and is on disk.
        Busy, TooManyTurns, SessionClosed, ServerMissing; what the line raises."""
        self._check_room(history)
        means, now = self.means, self.means.wall()
        starting = self._starting[history.id] = asyncio.get_running_loop().create_future()
        try:
            number = history.turns[-1].number + 1 if history.turns else 1
            turn = Turn(means.new_id("turn"), number, now, key=key)
            items = [UserItem(means.new_id("msg"), tuple(texts)) for texts in messages]
            listings = await means.mcp.listings(history, means.new_id)
            if not self.shelf.has(history):
                raise SessionClosed
            if listings:
                self.shelf.add(history, turn, *listings)
            driver = Driver(means, history, turn, self._lines(history))
            try:
                generation = await driver.prepare([user_message(item) for item in items])
            except BaseException:
                self.shelf.undo(history, turn)
                raise
            turn.base = generation.number - 1
            history.turns.append(turn)
            history.head.active = now
            try:
                self.shelf.add(history, turn, *items)
                self.shelf.keep_head(history)
                begun = ("in_progress", number)
                self.shelf.owe(history, [begun] if means.teller.wants(history, begun) else [])
                await booked(self.shelf.keep_turn(history, turn))
            except BaseException:
                generation.rollback()
                self.shelf.undo(history, turn)
                raise
            if not self.shelf.has(history):
                generation.rollback()
                raise SessionClosed
        finally:
            del self._starting[history.id]
            starting.set_result(None)
        means.teller.turn_created(history, turn)
        means.teller.in_progress(history, turn)
        told: list[Item] = [*listings, *items]
        for item in told:
            means.teller.added(history, turn, item)
        self._drivers[history.id] = driver
        driver.start(generation).add_done_callback(partial(self._over, driver))
        return turn

    def _check_room(self, history: History) -> None:
        """Whether a turn of it may begin now: Busy, TooManyTurns."""
        if history.active is not None or history.id in self._starting:
            raise Busy
        own = sum(driver.history.head.tenant == history.head.tenant for driver in self._drivers.values())
        if own >= MOST_RUNNING - MOST_RUNNING // SPARE:
            raise TooManyTurns(own)
        if len(self._drivers) >= MOST_RUNNING:
            raise TooManyTurns(None)

    async def background_result(
        self, history: History, turn: Turn, call: CallItem, outcome: ToolOutcome
    ) -> None:
        """A result that nobody waits for: the model reads it with its next call."""
        output = None if outcome.error is not None else outcome.output
        item = OutputItem(history.output_id(turn.id, call.call), call.call, output, outcome.error)
        kept = self.shelf.add(history, turn, item)
        self.means.teller.added(history, turn, item)
        self.means.teller.call_done(history, turn, call.call)
        await booked(kept)

    async def cancel(self, history: History) -> None:
        starting = self._starting.get(history.id)
        if starting is not None:
            await asyncio.shield(starting)
        driver = self._drivers.get(history.id)
        if driver is not None:
            await driver.cancel()

    async def close(self, history: History) -> Future[None] | None:
        """Forget a session; its turn is cancelled. What comes back is done when a restart would not bring
        it back."""
        await self.cancel(history)
        return self.shelf.drop(history)

    def heard(self, tenant: str, id_: str) -> None:
        """A result came for a session, whichever way."""
        history = self.shelf.get(tenant, id_)
        driver = None if history is None else self._drivers.get(history.id)
        if driver is not None:
            driver.heard()

    def has(self, tenant: str, id_: str) -> bool:
        return self.shelf.get(tenant, id_) is not None

    def resume(self) -> int:
        """Turns that an earlier process had go on; how many."""
        for history in self.shelf:
            turn = history.active
            if turn is not None:
                driver = Driver(self.means, history, turn, self._lines(history))
                self._drivers[history.id] = driver
                driver.start(None).add_done_callback(partial(self._over, driver))
        return len(self._drivers)

    async def stop(self) -> None:
        """The server leaves."""
        await asyncio.gather(*(driver.stop() for driver in list(self._drivers.values())))

    def _over(self, driver: Driver, task: asyncio.Task[None]) -> None:
        if self._drivers.get(driver.history.id) is driver:
            del self._drivers[driver.history.id]
