"""What is owed to whom, and what came of what was: the outbox without its disk.

Pure. Every change says which records it touched (`take_touched`), so that somebody can keep them; a ledger
that is made of the kept records goes on where this one was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from tools_bridge.webhooks.history import History
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
    owners_share: float = 0.5  # of endpoints and of what is owed, while nobody else has any
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
        self._owed_of: Counter[str] = Counter()  # to an owner's endpoints; and bytes of bodies
        self._owed_bytes_of: Counter[str] = Counter()
        self._log = History(self.limits.logged, self.limits.logged_of_endpoint, self.limits.logged_bytes)
        self._bodies: dict[Key, bytes] = {}
        self._results: dict[Key, int] = {}  # bytes of what was answered, until it is acknowledged
        self._owed_bytes = 0
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
        found = self.find(key)
        if found is None:
            raise UnknownDelivery(f"nothing is known of a delivery of {key.event[:80]!r}")
        return found

    def find(self, key: Key) -> Delivery | None:
        return self._owed.get(key) or self._log.entries.get(key)

    def body(self, key: Key) -> bytes:
        return self._bodies[key]

    def pending(self) -> list[Delivery]:
        return [delivery for delivery in self._owed.values() if delivery.state is State.PENDING]

    def unacknowledged(self) -> list[Delivery]:
        return [delivery for delivery in self._owed.values() if delivery.state is State.ENDED]

    def of_endpoint(self, name: str) -> list[Delivery]:
        """The newest first: what is owed, then the log."""
        owed = [self._owed[key] for key in self._owed_to.get(name, ())]
        return [*reversed(owed), *self._log.of_endpoint(name)]

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
        fits = self._fits(own, len(self.endpoints), 1, self.limits.endpoints)
        if own >= self.limits.endpoints_of_owner or not fits:
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
        self._forget(self._log.remove_endpoint(name))
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
        assert delivery.size == len(body)
        if len(body) > limits.body:
            raise EventTooLarge(f"an event has at most {limits.body} bytes")
        self._find_room(delivery, urgent=delivery.kind is Kind.TOOL)
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
        self._hold_result(delivery)
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
        self._find_room(was, urgent=False)
        body = self._bodies[key]
        self._forget([self._log.remove(key)])
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

    def _find_room(self, delivery: Delivery, urgent: bool) -> None:
        """Events leave room for tool calls: an endpoint that is down for days may be owed many. And no owners
        take the room of others."""
        owner, limits = delivery.owner, self.limits
        share = 1.0 if urgent else EVENTS_SHARE
        own, own_bytes = self._owed_of[owner], self._owed_bytes_of[owner]
        if not (
            self._fits(own, len(self._owed), 1, limits.owed * share)
            and self._fits(own_bytes, self._owed_bytes, delivery.size, limits.owed_bytes * share)
        ):
            raise OutboxFull("too many webhook deliveries are pending")
        if len(self._owed_to.get(delivery.endpoint, ())) >= limits.owed_to_endpoint:
            raise OutboxFull("too many deliveries are pending for this endpoint")

    def _fits(self, own: int, all_: int, more: int, room: float) -> bool:
        """An owner alone has a share of the room. The more others have, the smaller is his: what is left free
        shrinks with each, and somebody who has nothing finds some (dynamic thresholds: Choudhury and Hahne,
        IEEE/ACM ToN 6(2), 1998)."""
        share, left = self.limits.owners_share, room - all_ - more
        return left >= 0 and (own + more) * (1 - share) <= share * left

    # --- records ---------------------------------------------------------------------

    def take_touched(self) -> list[tuple[str | Key, Touched | None]]:
        """What was changed since the last call, as it is now; None: it is gone."""
        touched, self._touched = self._touched, {}
        return [(name, self._now(name)) for name in touched]

    def everything(self) -> Iterator[tuple[str | Key, Touched]]:
        yield from self.endpoints.items()
        yield from self._owed.items()
        yield from self._log.entries.items()

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
                self._hold_result(delivery)
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
        self._weigh(delivery, 1, len(body))
        self._put(delivery, new)

    def _weigh(self, delivery: Delivery, count: int, size: int) -> None:
        self._owed_bytes += size
        self._owed_of[delivery.owner] += count
        self._owed_bytes_of[delivery.owner] += size
        if not self._owed_of[delivery.owner]:
            del self._owed_of[delivery.owner], self._owed_bytes_of[delivery.owner]

    def _hold_result(self, delivery: Delivery) -> None:
        self._results[delivery.key] = len(msgspec.msgpack.encode(delivery.ending))
        self._weigh(delivery, 0, self._results[delivery.key])

    def _disown(self, key: Key) -> None:
        delivery, own = self._owed.pop(key), self._owed_to[key.endpoint]
        del own[key]
        if not own:
            del self._owed_to[key.endpoint]
        self._weigh(delivery, -1, -len(self._bodies[key]) - self._results.pop(key, 0))
        self._touched[key] = None

    def _remember(self, delivery: Delivery, new: bool = True) -> None:
        if new:
            self._touched[delivery.key] = None
        self._forget(self._log.add(delivery))

    def _forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._touched[key] = None
            self._lose_body(key)

    def _lose_body(self, key: Key) -> None:
        del self._bodies[key]

    def check(self) -> None:
        """What is counted is there, and within its bounds. For tests."""
        limits, log = self.limits, self._log.entries
        self._log.check()
        assert not self._owed.keys() & log.keys()
        assert self._bodies.keys() == self._owed.keys() | log.keys()
        bodies = sum(len(self._bodies[key]) for key in self._owed)
        assert bodies <= limits.owed_bytes
        assert self._owed_bytes == bodies + sum(self._results.values()) == self._owed_bytes_of.total()
        assert self._results.keys() == {delivery.key for delivery in self.unacknowledged()}
        assert self._owed_of == Counter(delivery.owner for delivery in self._owed.values())
        assert {key for own in self._owed_to.values() for key in own} == self._owed.keys()
        assert len(self._owed) <= limits.owed
        assert all(0 < len(own) <= limits.owed_to_endpoint for own in self._owed_to.values())
        for key, delivery in (*self._owed.items(), *log.items()):
            assert delivery.key == key
            assert delivery.size == len(self._bodies[key])
            assert (delivery.ending is None) == (delivery.state is State.PENDING)
            assert (key in log) == (delivery.state is State.LOGGED)
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
