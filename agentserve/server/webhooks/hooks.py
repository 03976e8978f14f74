"""The server's webhooks: what is delivered for whom, and to whom the outcomes go.

Outcomes of tool calls go to whoever expects them. One that comes before (a start hears those of an earlier
server first) waits until its call is taken up again, or has its result another way; one that nobody will
ask for is acknowledged at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress

from agentserve.server.text_port import JsonObject
from agentserve.server.webhooks.payloads import derived_event_id, event
from tools_bridge.webhooks.breaker import Circuit
from tools_bridge.webhooks.callback import CallbackTokens
from tools_bridge.webhooks.courier import Courier
from tools_bridge.webhooks.ledger import Ledger
from tools_bridge.webhooks.outbox import Outbox
from tools_bridge.webhooks.types import (
    Conflict,
    Delivered,
    Ending,
    Endpoint,
    Key,
    Kind,
    NotKept,
    Outcome,
    State,
    UnknownEndpoint,
    WebhookError,
)

log = logging.getLogger(__name__)

CALLBACKS = "/v1/tool_callbacks/"
MOST_PUBLISHING = 1000  # events that wait for the disk at once


class Hooks:
    """On the event loop, from `start` to `close`."""

    def __init__(self, courier: Courier, wall: Callable[[], float], callback_url: str = "") -> None:
        """`callback_url`: where receivers reach this server; empty: URLs of callbacks are relative."""
        self.courier = courier
        self.wall = wall
        self.counts: Counter[str] = Counter()  # what happened, for /metrics
        self.leaving = False  # calls that are cut off now go on in the next server
        self._base = callback_url.rstrip("/")
        self._waiting: dict[Key, asyncio.Future[Ending]] = {}
        self._keys: dict[str, Key] = {}  # of events that are owed to calls
        self._early: dict[Key, Ending] = {}
        self._wanted: set[str] = set()  # events whose calls will be taken up again
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Unix time that passes as time does: deadlines are told by it."""
        return self.courier.now()

    @property
    def outbox(self) -> Outbox:
        return self.courier.outbox

    @property
    def ledger(self) -> Ledger:
        return self.courier.outbox.ledger

    @property
    def tokens(self) -> CallbackTokens:
        return self.courier.outbox.tokens

    # --- its life ----------------------------------------------------------------------

    def start(self, wanted: Iterable[str] = ()) -> None:
        """`wanted`: events of calls that wait for a result. What an earlier server was to deliver of others
        is withdrawn: they were cancelled, or have their results."""
        self._wanted = set(wanted)
        for delivery in (*self.ledger.pending(), *self.ledger.unacknowledged()):
            if delivery.waited_for and delivery.event in self._wanted:
                self._keys[delivery.event] = delivery.key
        for delivery in self.ledger.pending():
            if delivery.waited_for and delivery.event not in self._wanted:
                self._spawn(self._withdraw(delivery.key))
        self._reader = asyncio.create_task(self._read())
        self._spawn(self._begin())

    async def _begin(self) -> None:
        """After what was withdrawn has been: it is not to be attempted."""
        self.courier.start()

    def leave(self) -> None:
        self.leaving = True

    async def close(self) -> None:
        self.leave()
        tasks = [*self._tasks, *([self._reader] if self._reader is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.courier.close()
        await self.outbox.close()

    # --- endpoints ---------------------------------------------------------------------

    def endpoint(self, owner: str, id_: str) -> Endpoint:
        """Of others nobody learns. UnknownEndpoint."""
        found = self.ledger.endpoints.get(id_)
        if found is None or found.owner != owner:
            raise UnknownEndpoint(f"there is no webhook endpoint {id_[:80]!r}")
        return found

    def named(self, owner: str, name: str) -> Endpoint:
        """By its id, or by its URL: then the oldest of the owner's. UnknownEndpoint."""
        if "://" not in name:
            return self.endpoint(owner, name)
        own = [each for each in self.ledger.endpoints.values() if (each.owner, each.url) == (owner, name)]
        if not own:
            raise UnknownEndpoint(f"there is no webhook endpoint with the URL {name[:200]!r}")
        return min(own, key=lambda each: (each.created, each.id))

    def endpoints(self, owner: str) -> list[Endpoint]:
        own = (endpoint for endpoint in self.ledger.endpoints.values() if endpoint.owner == owner)
        return sorted(own, key=lambda endpoint: (endpoint.created, endpoint.id))

    # --- tool calls --------------------------------------------------------------------

    def callback_url(self, token: str) -> str:
        return f"{self._base}{CALLBACKS}{token}"

    def owed(self, event: str) -> Key | None:
        """To where a call is being delivered, or was and its outcome is not settled."""
        return self._keys.get(event)

    async def deliver(self, key: Key, kind: str, body: Callable[[], bytes], deadline: float) -> Ending:
        """How the delivery of a call ends, `deadline` (as `now`) at the latest. One that was
        accepted before goes on. Errors of `Courier.call`. Cancelled, it goes on until `settled`: until what
        came instead cannot be lost."""
        known = self._early.pop(key, None)
        if known is not None:
            return known
        future: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        self._keys[key.event] = key
        try:
            found = self.ledger.find(key)
            if found is not None and found.state is State.LOGGED and found.ending is not None:
                return found.ending  # and its receiver may still post the result
            if found is None:
                await self.courier.call(key.endpoint, key.event, kind, body(), deadline)
                self.counts["calls"] += 1
            return await future
        finally:
            del self._waiting[key]

    def settled(self, event: str) -> None:
        """The call has its result, or will get none: nothing more is to be delivered or told."""
        self._wanted.discard(event)
        key = self._keys.pop(event, None)
        if key is None:
            return
        self._early.pop(key, None)
        found = self.ledger.find(key)
        if found is None:
            return
        if found.state is State.PENDING and found.waited_for:
            self._spawn(self._withdraw(key))
        else:
            self.courier.acknowledge(key)

    async def _withdraw(self, key: Key) -> None:
        self._wanted.discard(key.event)
        self._keys.pop(key.event, None)
        if await self.courier.withdraw(key):
            self.counts["withdrawn"] += 1

    async def _read(self) -> None:
        while True:
            told = await self.courier.outcomes.get()
            if not isinstance(told, Outcome):
                log.warning("the webhook endpoint %s is disabled: %s", told.endpoint, told.why)
                continue
            self.counts["taken" if isinstance(told.ending, Delivered) else "given_up"] += 1
            future = self._waiting.get(told.key)
            if future is not None and not future.done():
                future.set_result(told.ending)
            elif told.key.event in self._wanted:
                self._early[told.key] = told.ending
            elif future is None and told.key.event not in self._keys:
                self.courier.acknowledge(told.key)

    # --- events ------------------------------------------------------------------------

    def wants(self, owner: str, kind: str) -> bool:
        """Somebody is to be told of such an event: whoever keeps what it is about keeps that it is owed."""
        return bool(self.ledger.subscribed(owner, kind))

    def publish(
        self, owner: str, kind: str, data: JsonObject, names: Sequence[str | int], kept: Callable[[], None]
    ) -> None:
        """Tell the owner's endpoints that want it. Nobody waits for that, and nothing fails with it. `names`:
        of what happened; by the same ones it is one event, however often and in however many servers it is
        published. `kept` is called when it is owed no more but by the outbox."""
        if self.leaving:
            return
        if not self.wants(owner, kind):
            kept()
        elif len(self._tasks) >= MOST_PUBLISHING:
            self.counts["dropped"] += 1
        else:
            self._spawn(self._publish(owner, kind, data, derived_event_id(owner, kind, *names), kept))

    async def _publish(
        self, owner: str, kind: str, data: JsonObject, id_: str, kept: Callable[[], None]
    ) -> None:
        try:
            await self.courier.publish(owner, id_, kind, event(id_, kind, self.wall(), data))
            self.counts["events"] += 1
        except Conflict:
            log.debug("an event of type %s was published before", kind)
        except WebhookError as error:
            self.counts["dropped"] += 1
            log.warning("an event of type %s could not be kept: %s", kind, error)
            if isinstance(error, NotKept):
                return  # the next server publishes it
        kept()

    # --- what is seen of it ------------------------------------------------------------

    def health(self) -> JsonObject:
        outbox, told = self.outbox, {}
        told = {"state": "ok", "endpoints": len(self.ledger.endpoints), "owed": self.courier.owed}
        if outbox.skipped:
            told["skipped"] = outbox.skipped
        if outbox.failure is not None:
            told |= {
                "state": "failing",
                "since": round(outbox.failure.since, 3),
                "reason": outbox.failure.reason,
            }
        if outbox.damages:
            told["damages"] = list(outbox.damages[-8:])
        return {"webhooks": told}

    def faults(self) -> list[JsonObject]:
        """Nothing is accepted then: tools that need it fail."""
        failure = self.outbox.failure
        if failure is None:
            return []
        return [{"part": "webhooks_disk", "reason": failure.reason, "since": round(failure.since, 3)}]

    def metrics(self) -> tuple[float, ...]:
        """For `Metrics.set_webhooks`."""
        endpoints = self.ledger.endpoints.values()
        circuits = sum(self.courier.circuit(each.id) is not Circuit.CLOSED for each in endpoints)
        names = ("calls", "taken", "given_up", "withdrawn", "events", "dropped", "callbacks", "refused")
        return (
            len(endpoints),
            sum(bool(each.disabled) for each in endpoints),
            circuits,
            sum(delivery.kind is Kind.TOOL for delivery in self.ledger.pending()),
            self.courier.owed,
            self.outbox.failure is not None,
            self.outbox.skipped,
            *(self.counts[name] for name in names),
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with suppress(asyncio.CancelledError):
            if (error := task.exception()) is not None:
                log.error("webhooks: internal error", exc_info=error)
