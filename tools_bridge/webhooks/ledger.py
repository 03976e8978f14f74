"""What is owed to whom, and what came of what was: the outbox without its disk.

Pure. Every change says which records it touched (`take_touched`), so that somebody can keep them; a ledger
that is made of the kept records goes on where this one was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from tools_bridge.webhooks.signing import check_event_id
from tools_bridge.webhooks.types import (
    Attempt,
    Conflict,
    Delivered,
    Delivery,
    Ending,
    Endpoint,
    EndpointDisabled,
    EventTooLarge,
    GaveUp,
    Key,
    Kind,
    OutboxFull,
    State,
    UnknownDelivery,
    UnknownEndpoint,
    Why,
)

MOST_ATTEMPTS = 20  # of one delivery that are remembered
MOST_DETAIL = 300  # characters
EVENTS_SHARE = 0.75  # of what may be owed


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """Counts, and bytes of bodies. What is owed and what is remembered are bounded apart."""

    endpoints: int = 1000
    endpoints_of_owner: int = 100
    body: int = 1 << 20
    owed: int = 10_000
    owed_to_endpoint: int = 1000
    owed_bytes: int = 64 << 20
    logged: int = 5000
    logged_of_endpoint: int = 100
    logged_bytes: int = 32 << 20


Touched = Endpoint | Delivery


class Ledger:
    def __init__(self, limits: OutboxLimits | None = None) -> None:
        self.limits = limits or OutboxLimits()
        self.endpoints: dict[str, Endpoint] = {}
        self._owed: dict[Key, Delivery] = {}  # pending, or ended and not acknowledged
        self._owed_to: dict[str, dict[Key, None]] = {}
        self._log: OrderedDict[Key, Delivery] = OrderedDict()  # the oldest first
        self._log_of: dict[str, OrderedDict[Key, None]] = {}
        self._bodies: dict[Key, bytes] = {}
        self._results: dict[Key, int] = {}  # bytes of what was answered, until it is acknowledged
        self._owed_bytes = self._logged_bytes = 0
        self._touched: dict[str | Key, None] = {}

    # --- what there is ---------------------------------------------------------------

    def endpoint(self, name: str) -> Endpoint:
        """UnknownEndpoint."""
        try:
            return self.endpoints[name]
        except KeyError:
            raise UnknownEndpoint(f"there is no endpoint {name[:80]!r}") from None

    def delivery(self, key: Key) -> Delivery:
        """UnknownDelivery, also where the log has forgotten it."""
        found = self._owed.get(key) or self._log.get(key)
        if found is None:
            raise UnknownDelivery(f"nothing is known of a delivery of {key.event[:80]!r}")
        return found

    def find(self, key: Key) -> Delivery | None:
        return self._owed.get(key) or self._log.get(key)

    def body(self, key: Key) -> bytes:
        return self._bodies[key]

    def pending(self) -> list[Delivery]:
        return [delivery for delivery in self._owed.values() if delivery.state is State.PENDING]

    def unacknowledged(self) -> list[Delivery]:
        return [delivery for delivery in self._owed.values() if delivery.state is State.ENDED]

    def of_endpoint(self, name: str) -> list[Delivery]:
        """The newest first: what is owed, then the log."""
        owed = [self._owed[key] for key in self._owed_to.get(name, ())]
        return [*reversed(owed), *(self._log[key] for key in reversed(self._log_of.get(name, {})))]

    def subscribed(self, owner: str, type: str) -> list[Endpoint]:
        return [
            endpoint
            for endpoint in self.endpoints.values()
            if endpoint.owner == owner and type in endpoint.event_types and not endpoint.disabled
        ]

    # --- endpoints -------------------------------------------------------------------

    def add_endpoint(self, endpoint: Endpoint) -> None:
        """OutboxFull."""
        own = sum(other.owner == endpoint.owner for other in self.endpoints.values())
        if len(self.endpoints) >= self.limits.endpoints or own >= self.limits.endpoints_of_owner:
            raise OutboxFull("there are too many webhook endpoints")
        self.change_endpoint(endpoint)

    def change_endpoint(self, endpoint: Endpoint) -> None:
        self.endpoints[endpoint.id] = endpoint
        self._touched[endpoint.id] = None

    def close_endpoint(self, name: str, why: Why, detail: str, now: float) -> list[Delivery]:
        """Ends all that is pending for it: those."""
        ended = []
        for key in list(self._owed_to.get(name, ())):
            if self._owed[key].state is State.PENDING:
                ended.append(self.end(key, GaveUp(why, detail), now))
        return ended

    def remove_endpoint(self, name: str, now: float) -> list[Delivery]:
        """With its log; what is pending for it ends: those."""
        self.endpoint(name)
        ended = self.close_endpoint(name, Why.ENDPOINT_DELETED, "the endpoint was deleted", now)
        del self.endpoints[name]
        self._touched[name] = None
        for key in list(self._log_of.get(name, ())):
            self._forget(key)
        return ended

    # --- deliveries ------------------------------------------------------------------

    def accept(self, delivery: Delivery, body: bytes) -> bool:
        """False: it was accepted before, and is what it has become. UnknownEndpoint, EndpointDisabled,
        EventTooLarge, OutboxFull, Conflict; ValueError for an id that cannot be."""
        check_event_id(delivery.event)
        key, limits = delivery.key, self.limits
        if self.find(key) is not None:
            if self._bodies[key] != body:
                raise Conflict("another event had this id")
            return False
        self._check_enabled(delivery.endpoint)
        if len(body) > limits.body:
            raise EventTooLarge(f"an event has at most {limits.body} bytes")
        self._find_room(delivery.endpoint, len(body), delivery.kind is Kind.TOOL)
        self._owe(delivery, body)
        return True

    def attempted(self, key: Key, attempt: Attempt, next_at: float) -> Delivery:
        """It failed, and is tried again."""
        was = self._owed[key]
        assert was.state is State.PENDING
        return self._put(
            msgspec.structs.replace(
                was, tries=was.tries + 1, attempts=_with(was.attempts, attempt), next_at=next_at
            )
        )

    def end(self, key: Key, ending: Ending, now: float, attempt: Attempt | None = None) -> Delivery:
        """Once for each delivery, and once more for each replay."""
        was = self._owed[key]
        assert was.state is State.PENDING
        if isinstance(ending, GaveUp):
            ending = GaveUp(ending.why, ending.detail[:MOST_DETAIL])
        delivery = msgspec.structs.replace(
            was,
            state=State.ENDED,
            tries=was.tries + (attempt is not None),
            attempts=was.attempts if attempt is None else _with(was.attempts, attempt),
            ending=ending,
            ended=now,
        )
        self._put(delivery)
        self._results[key] = len(msgspec.msgpack.encode(ending))
        self._owed_bytes += self._results[key]
        withdrawn = isinstance(ending, GaveUp) and ending.why is Why.WITHDRAWN
        if not delivery.waited_for or withdrawn:
            self.acknowledge(key)
        return delivery

    def acknowledge(self, key: Key) -> bool:
        """Whoever waited for it knows how it ended. False: there was nothing to know (any more)."""
        delivery = self._owed.get(key)
        if delivery is None or delivery.state is not State.ENDED:
            return False
        self._disown(key)
        if key.endpoint not in self.endpoints:
            self._lose_body(key)
            return True
        # What a tool answered has been read; the log says only that it did.
        ending = Delivered() if isinstance(delivery.ending, Delivered) else delivery.ending
        self._remember(msgspec.structs.replace(delivery, state=State.LOGGED, ending=ending))
        return True

    def unaccept(self, key: Key) -> None:
        """As if it had never been accepted: the disk did not take it."""
        if key in self._owed:
            self._disown(key)
            self._lose_body(key)

    def replay(self, key: Key, now: float) -> Delivery:
        """Deliver it once more, under its own id. What it was. UnknownDelivery, UnknownEndpoint, Conflict,
        EndpointDisabled, OutboxFull."""
        was = self.delivery(key)
        if was.state is not State.LOGGED:
            raise Conflict("it has not ended yet")
        self._check_enabled(key.endpoint)
        self._find_room(key.endpoint, was.size, urgent=False)
        body = self._bodies[key]
        self._forget(key)
        delivery = msgspec.structs.replace(
            was,
            state=State.PENDING,
            began=now,
            next_at=now,
            tries=0,
            ending=None,
            ended=0.0,
            replays=was.replays + 1,
        )
        self._owe(delivery, body)
        return was

    def unreplay(self, was: Delivery) -> None:
        """As if it had not been replayed: the disk did not take it."""
        now = self._owed.get(was.key)
        if now is not None and now.state is State.PENDING and was.endpoint in self.endpoints:
            self._disown(was.key)
            self._remember(was)

    def _check_enabled(self, name: str) -> None:
        if disabled := self.endpoint(name).disabled:
            raise EndpointDisabled(f"the endpoint is disabled: {disabled}")

    def _find_room(self, endpoint: str, size: int, urgent: bool) -> None:
        """Events leave room for tool calls: an endpoint that is down for days may be owed many."""
        limits, share = self.limits, 1.0 if urgent else EVENTS_SHARE
        if len(self._owed) >= limits.owed * share or self._owed_bytes + size > limits.owed_bytes * share:
            raise OutboxFull("too many webhook deliveries are pending")
        if len(self._owed_to.get(endpoint, ())) >= limits.owed_to_endpoint:
            raise OutboxFull("too many deliveries are pending for this endpoint")

    # --- records ---------------------------------------------------------------------

    def take_touched(self) -> list[tuple[str | Key, Touched | None]]:
        """What was changed since the last call, as it is now; None: it is gone."""
        touched, self._touched = self._touched, {}
        return [(name, self._now(name)) for name in touched]

    def everything(self) -> Iterator[tuple[str | Key, Touched]]:
        yield from self.endpoints.items()
        yield from self._owed.items()
        yield from self._log.items()

    def restore(
        self, endpoints: Iterable[Endpoint], kept: Iterable[tuple[Delivery, bytes]], now: float
    ) -> None:
        """Fill an empty ledger with what was kept. What is owed to an endpoint that is gone ends; what is no
        part of anything any more is touched, so that it is dropped."""
        for endpoint in endpoints:
            self.endpoints[endpoint.id] = endpoint
        deliveries = sorted(kept, key=lambda pair: (pair[0].ended or pair[0].created, pair[0].key))
        for delivery, body in deliveries:
            delivery = _not_of_the_future(delivery, now)
            if delivery.state is State.LOGGED:
                if delivery.endpoint in self.endpoints:
                    self._bodies[delivery.key] = body
                    self._remember(delivery, new=False)
                else:
                    self._touched[delivery.key] = None
                continue
            self._owe(delivery, body, new=False)
            if delivery.ending is not None:
                self._results[delivery.key] = len(msgspec.msgpack.encode(delivery.ending))
                self._owed_bytes += self._results[delivery.key]
            if delivery.state is State.PENDING and delivery.endpoint not in self.endpoints:
                self.end(delivery.key, GaveUp(Why.ENDPOINT_DELETED, "the endpoint is gone"), now)

    def _now(self, name: str | Key) -> Touched | None:
        return self.endpoints.get(name) if isinstance(name, str) else self.find(name)

    def _put(self, delivery: Delivery, new: bool = True) -> Delivery:
        self._owed[delivery.key] = delivery
        if new:
            self._touched[delivery.key] = None
        return delivery

    def _owe(self, delivery: Delivery, body: bytes, new: bool = True) -> None:
        self._bodies[delivery.key] = body
        self._owed_to.setdefault(delivery.endpoint, {})[delivery.key] = None
        self._owed_bytes += len(body)
        self._put(delivery, new)

    def _disown(self, key: Key) -> None:
        del self._owed[key]
        own = self._owed_to[key.endpoint]
        del own[key]
        if not own:
            del self._owed_to[key.endpoint]
        self._owed_bytes -= len(self._bodies[key]) + self._results.pop(key, 0)
        self._touched[key] = None

    def _remember(self, delivery: Delivery, new: bool = True) -> None:
        key, own = delivery.key, self._log_of.setdefault(delivery.endpoint, OrderedDict())
        self._log[key] = delivery
        own[key] = None
        self._logged_bytes += len(self._bodies[key])
        if new:
            self._touched[key] = None
        while len(own) > self.limits.logged_of_endpoint:
            self._forget(next(iter(own)))
        while len(self._log) > self.limits.logged or self._logged_bytes > self.limits.logged_bytes:
            self._forget(next(iter(self._log)))

    def _forget(self, key: Key) -> None:
        del self._log[key]
        own = self._log_of[key.endpoint]
        del own[key]
        if not own:
            del self._log_of[key.endpoint]
        self._logged_bytes -= len(self._bodies[key])
        self._touched[key] = None
        self._lose_body(key)

    def _lose_body(self, key: Key) -> None:
        del self._bodies[key]

    def check(self) -> None:
        """What is counted is there, and within its bounds. For tests."""
        limits = self.limits
        assert not self._owed.keys() & self._log.keys()
        assert self._bodies.keys() == self._owed.keys() | self._log.keys()
        bodies = sum(len(self._bodies[key]) for key in self._owed)
        assert bodies <= limits.owed_bytes
        assert self._owed_bytes == bodies + sum(self._results.values())
        assert self._results.keys() == {delivery.key for delivery in self.unacknowledged()}
        assert self._logged_bytes == sum(len(self._bodies[key]) for key in self._log) <= limits.logged_bytes
        assert {key for own in self._owed_to.values() for key in own} == self._owed.keys()
        assert {key for own in self._log_of.values() for key in own} == self._log.keys()
        assert len(self._owed) <= limits.owed
        assert len(self._log) <= limits.logged
        assert all(0 < len(own) <= limits.logged_of_endpoint for own in self._log_of.values())
        assert all(0 < len(own) <= limits.owed_to_endpoint for own in self._owed_to.values())
        for key, delivery in (*self._owed.items(), *self._log.items()):
            assert delivery.key == key
            assert delivery.size == len(self._bodies[key])
            assert (delivery.ending is None) == (delivery.state is State.PENDING)
            assert (key in self._log) == (delivery.state is State.LOGGED)
            assert len(delivery.attempts) <= MOST_ATTEMPTS


def _not_of_the_future(delivery: Delivery, now: float) -> Delivery:
    """The machine's clock may have been set back meanwhile: what is due then is due now."""
    back = delivery.began - now
    if back <= 0 or delivery.state is not State.PENDING:
        return delivery
    deadline = None if delivery.deadline is None else delivery.deadline - back
    return msgspec.structs.replace(delivery, began=now, next_at=delivery.next_at - back, deadline=deadline)


def _with(attempts: tuple[Attempt, ...], attempt: Attempt) -> tuple[Attempt, ...]:
    return (*attempts, attempt)[-MOST_ATTEMPTS:]
