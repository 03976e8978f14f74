"""Takes what is owed to its endpoints, when it is due, and says what came of it.

A tool call through an open circuit waits, if the endpoint is tried again before the call's deadline; else
it ends at once. An attempt that is cut off (the server leaves, or is killed) was none: it is made again,
under the same id. So a receiver may hear of an event more than once, always by the same id, and never not.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tools_bridge.webhooks.attempt import Post, Sender
from tools_bridge.webhooks.breaker import BreakerSettings, Circuit
from tools_bridge.webhooks.lanes import Lanes, Places
from tools_bridge.webhooks.outbox import Outbox
from tools_bridge.webhooks.replies import Again, Answered, Failed, Fault, Gone, Never, Reply, Taken, judge
from tools_bridge.webhooks.schedule import LIFECYCLE, TOOL, next_attempt
from tools_bridge.webhooks.signing import active, signed
from tools_bridge.webhooks.types import (
    Attempt,
    Delivered,
    Delivery,
    Disabled,
    Endpoint,
    GaveUp,
    Key,
    Kind,
    NotKept,
    Outcome,
    State,
    Time,
    Told,
    Why,
)

log = logging.getLogger(__name__)

_LONGEST_SLEEP = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class CourierSettings:
    attempt_seconds: float = 20.0
    places: Places = field(default_factory=Places)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


@dataclass(frozen=True, slots=True)
class Tested:
    """What an endpoint said to an event that was sent to try it."""

    status: int | None
    error: str
    seconds: float


class Courier:
    """On the event loop, from `start` to `close`."""

    def __init__(
        self,
        outbox: Outbox,
        sender: Sender,
        clock: Time,
        settings: CourierSettings | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw`: numbers in [0, 1), for jitter."""
        self.outbox = outbox
        self.outcomes: asyncio.Queue[Told] = asyncio.Queue()  # bounded by what is owed
        self._sender = sender
        self._clock = clock
        self._settings = settings or CourierSettings()
        self._draw = draw
        self._lanes = Lanes(self._settings.places, self._settings.breaker)
        self._attempts: dict[Key, asyncio.Task[None]] = {}  # on the wire
        self._tasks: set[asyncio.Task[None]] = set()  # also those that wait for the disk
        self._stop_timer: Callable[[], None] | None = None
        self._woken = False
        self._running = False

    def start(self) -> None:
        """Goes on with what an earlier server left."""
        self._running = True
        for delivery in self.outbox.ledger.unacknowledged():
            self._tell(delivery)
        for delivery in self.outbox.ledger.pending():
            self._lanes.put(delivery)
        self._wake()

    async def close(self) -> None:
        """At once: attempts that run are cut off, and stay pending. The outbox is its owner's to close."""
        self._running = False
        if self._stop_timer is not None:
            self._stop_timer()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what is sent ----------------------------------------------------------------

    async def call(self, endpoint_id: str, event: str, type: str, body: bytes, deadline: float) -> None:
        """Deliver a tool call; its `Outcome` comes by `deadline` (Unix time, as `clock.now`), or as soon as
        the disk has its end. On return it is kept. With an id that was used it changes nothing: what became
        of that one is told, or was.

        UnknownEndpoint, EndpointDisabled, EventTooLarge, OutboxFull, Conflict, NotKept; ValueError.
        """
        await self._accept([self._delivery(endpoint_id, event, type, body, deadline)], body)

    async def publish(self, owner: str, event: str, type: str, body: bytes) -> list[str]:
        """Deliver an event to all of an owner's endpoints that want it and are not owed too much: those.
        OutboxFull where that is none of several, EventTooLarge, Conflict, NotKept; ValueError."""
        endpoints = self.outbox.ledger.subscribed(owner, type)
        deliveries = [self._delivery(each.id, event, type, body) for each in endpoints]
        if not deliveries:
            return []
        await self._accept(deliveries, body, spare=True)
        return [each.endpoint for each in deliveries if self.outbox.ledger.find(each.key) is not None]

    async def replay(self, key: Key) -> None:
        """Deliver once more, as an event: nobody waits for its outcome. Errors of `Outbox.replay`."""
        await self.outbox.replay(key)
        self._due(key)

    async def withdraw(self, key: Key) -> bool:
        """Whoever sent it needs it no more; there is no outcome. False: it never was, or it has ended (its
        outcome may be on its way, and is not told again after a restart)."""
        found = self.outbox.ledger.find(key)
        if found is None or found.state is not State.PENDING:
            self.outbox.acknowledge(key)
            return False
        self._let_go([key])
        self.outbox.end(key, GaveUp(Why.WITHDRAWN))
        await self._settled()
        return True

    def acknowledge(self, key: Key) -> None:
        """Whoever waited knows its outcome, for good: it is not told again."""
        self.outbox.acknowledge(key)

    async def test(self, endpoint_id: str, event: str, body: bytes) -> Tested:
        """One attempt, that nothing is kept of. UnknownEndpoint; ValueError."""
        endpoint = self.outbox.ledger.endpoint(endpoint_id)
        began = self._clock.now()
        reply = await self._post(endpoint, event, body, self._settings.attempt_seconds, wants_body=False)
        attempt = _attempt(reply, began, self._clock.now())
        return Tested(attempt.status, attempt.error, attempt.seconds)

    async def update(
        self,
        endpoint_id: str,
        *,
        name: str | None = None,
        url: str | None = None,
        event_types: Sequence[str] | None = None,
        form: str | None = None,
    ) -> Endpoint:
        """What is None stays. What is pending goes to the new URL. Errors of `Outbox.update_endpoint`."""
        endpoint = await self.outbox.update_endpoint(
            endpoint_id, name=name, url=url, event_types=event_types, form=form
        )
        if url is not None:
            self._anew(endpoint_id)
        return endpoint

    async def enable(self, endpoint_id: str) -> Endpoint:
        """UnknownEndpoint, NotKept."""
        endpoint = await self.outbox.enable_endpoint(endpoint_id)
        self._anew(endpoint_id)
        return endpoint

    def _anew(self, endpoint_id: str) -> None:
        self._lanes.reset(endpoint_id)
        self._wake()

    async def disable(self, endpoint_id: str, why: str) -> None:
        """UnknownEndpoint."""
        self._closed_endpoint(self.outbox.disable_endpoint(endpoint_id, why), Disabled(endpoint_id, why))
        await self._settled()

    async def delete(self, endpoint_id: str) -> None:
        """UnknownEndpoint. What was owed to it is given up."""
        self._closed_endpoint(self.outbox.delete_endpoint(endpoint_id), None)
        self._lanes.forget(endpoint_id)
        await self._settled()

    def now(self) -> float:
        """The clock that deadlines are told by."""
        return self._clock.now()

    def unix(self, at: float) -> float:
        """A moment of that clock, by the machine's as it is now."""
        return at + self._clock.unix() - self._clock.now()

    def circuit(self, endpoint_id: str) -> Circuit:
        return self._lanes.circuit(endpoint_id, self._clock.now())

    @property
    def owed(self) -> int:
        """Deliveries that have not ended."""
        return len(self._lanes)

    def _delivery(
        self, endpoint_id: str, event: str, type: str, body: bytes, deadline: float | None = None
    ) -> Delivery:
        now = self._clock.now()
        return Delivery(
            endpoint=endpoint_id,
            owner=self.outbox.ledger.endpoint(endpoint_id).owner,
            event=event,
            type=type,
            kind=Kind.LIFECYCLE if deadline is None else Kind.TOOL,
            created=now,
            began=now,
            next_at=now,
            size=len(body),
            deadline=deadline,
        )

    async def _accept(self, deliveries: Sequence[Delivery], body: bytes, *, spare: bool = False) -> None:
        for key in await self.outbox.accept(deliveries, body, spare=spare):
            self._due(key)

    def _due(self, key: Key) -> None:
        """It was kept. While the disk was waited for, it may have been ended."""
        found = self.outbox.ledger.find(key)
        if found is not None and found.state is State.PENDING:
            self._lanes.put(found)
            self._wake()

    # --- attempts --------------------------------------------------------------------

    def _wake(self) -> None:
        if self._running and not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Begin what is due, end what has no hope, and be woken when something may have changed."""
        self._woken = False
        if not self._running:
            return
        now = self._clock.now()
        for key, blocked in self._lanes.hopeless(now):
            self._lanes.drop(key)
            detail = "the endpoint keeps failing, or asked for a pause: it is not tried before the deadline"
            ending = GaveUp(Why.CIRCUIT_OPEN, detail) if blocked else GaveUp(Why.DEADLINE, "no time was left")
            self._spawn(self._finish(self.outbox.end(key, ending)))
        for key in list(self._lanes.take(now)):
            self._attempts[key] = self._spawn(self._attempt(key))
        if self._stop_timer is not None:
            self._stop_timer()
        at = self._lanes.next_moment(now)
        wait = _LONGEST_SLEEP if at is None else min(max(0.0, at - now), _LONGEST_SLEEP)
        self._stop_timer = self._clock.later(wait, self._wake)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _attempt(self, key: Key) -> None:
        ledger = self.outbox.ledger
        delivery, endpoint = ledger.delivery(key), ledger.endpoint(key.endpoint)
        began, seconds = self._clock.now(), self._settings.attempt_seconds
        if delivery.waited_for and delivery.deadline is not None:
            seconds = min(seconds, delivery.deadline - began)
        try:
            body = ledger.body(key)
            reply = await self._post(endpoint, key.event, body, seconds, wants_body=delivery.waited_for)
        except Exception as error:
            log.exception("an attempt to deliver failed")
            reply = Failed(Fault.INTERNAL, type(error).__name__)
        # From here to the end of `_came` nobody else runs: it has ended, or is tried again.
        del self._attempts[key]
        ended = self._came(delivery, reply, _attempt(reply, began, self._clock.now()))
        self._wake()
        if ended is not None:
            await self._finish(ended)

    async def _post(
        self, endpoint: Endpoint, event: str, body: bytes, seconds: float, wants_body: bool
    ) -> Reply:
        secrets = active(endpoint.secrets, self._clock.now())
        headers = signed(secrets, event, self._clock.unix(), body)
        return await self._sender.send(Post(endpoint.url, headers, body, seconds, wants_body))

    def _came(self, delivery: Delivery, reply: Reply, attempt: Attempt) -> Delivery | None:
        """What an attempt came to; the delivery, if it has ended."""
        key, now = delivery.key, self._clock.now()
        kind = Kind.TOOL if delivery.waited_for else Kind.LIFECYCLE
        match judge(kind, reply, self._clock.unix()):
            case Taken(result):
                self._lanes.succeeded(key)
                return self.outbox.end(key, Delivered(result), attempt)
            case Gone(error):
                self._lanes.succeeded(key)
                ended = self.outbox.end(key, GaveUp(Why.ENDPOINT_DISABLED, error), attempt)
                self._closed_endpoint(
                    self.outbox.disable_endpoint(key.endpoint, error), Disabled(key.endpoint, error)
                )
                return ended
            case Never(why, error, counts):
                self._lanes.failed(key, now) if counts else self._lanes.succeeded(key)
                return self.outbox.end(key, GaveUp(why, error), attempt)
            case Again(error, counts, pause):
                until = now + pause if pause else None
                if counts:
                    self._lanes.failed(key, now, until)
                else:
                    self._lanes.succeeded(key, until)
                return self._again(delivery, error, attempt, pause)

    def _again(self, delivery: Delivery, error: str, attempt: Attempt, pause: float) -> Delivery | None:
        deadline = delivery.deadline if delivery.waited_for else None
        at = next_attempt(
            TOOL if delivery.waited_for else LIFECYCLE,
            delivery.tries + 1,
            delivery.began,
            self._clock.now(),
            self._draw,
            deadline=deadline,
            retry_after=pause,
        )
        if at is None:
            why = Why.EXHAUSTED if deadline is None else Why.DEADLINE
            return self.outbox.end(delivery.key, GaveUp(why, error), attempt)
        self._lanes.put(self.outbox.attempted(delivery.key, attempt, at))
        return None

    # --- ends ------------------------------------------------------------------------

    async def _finish(self, delivery: Delivery) -> None:
        """Its end is on disk, if the disk takes it, before it is told: who hears it twice must have had the
        chance to say that it knows."""
        if delivery.waited_for:
            await self._settled()
            self._tell(delivery)

    def _tell(self, delivery: Delivery) -> None:
        if delivery.waited_for and delivery.ending is not None:
            self.outcomes.put_nowait(Outcome(delivery.key, delivery.ending))

    async def _settled(self) -> None:
        if not self.outbox.hung:
            with suppress(NotKept):  # it is written when the disk is back
                await self.outbox.kept()

    def _closed_endpoint(self, ended: Sequence[Delivery], told: Disabled | None) -> None:
        self._let_go([delivery.key for delivery in ended])
        for delivery in ended:
            self._spawn(self._finish(delivery))
        if told is not None:
            self.outcomes.put_nowait(told)

    def _let_go(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._lanes.drop(key)
            if (task := self._attempts.pop(key, None)) is not None:
                task.cancel()
        self._wake()


def _attempt(reply: Reply, began: float, now: float) -> Attempt:
    if isinstance(reply, Answered):
        error = "" if 200 <= reply.status < 300 else f"status {reply.status}"
        return Attempt(began, now - began, reply.status, error)
    return Attempt(began, now - began, reply.status, str(reply))
