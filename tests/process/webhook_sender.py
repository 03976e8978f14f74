"""A sender of webhooks in a process of its own, that can be made to kill itself at a point.

`run`: its folder, the receiver's port, the endpoint's secret, the point (or `-`), then events. It says
`accepted ID` when an event is kept, and `ended ID …` when it heard of its end, and acknowledges that.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.attempt import HttpSender
from tools_bridge.webhooks.clock import LoopTime
from tools_bridge.webhooks.courier import Courier
from tools_bridge.webhooks.dial import SystemResolver
from tools_bridge.webhooks.outbox import Outbox
from tools_bridge.webhooks.replies import Reply
from tools_bridge.webhooks.signing import key_of
from tools_bridge.webhooks.store import Change, Store, Table
from tools_bridge.webhooks.types import Delivery, Kind, Outcome, State

POINTS = (
    *("accept.before", "accept.inside", "accept.after", "accepted.untold"),
    *("attempt.before", "attempt.after"),
    *("end.before", "end.after", "end.untold", "told.unacknowledged"),
    *("acknowledge.before", "acknowledge.after"),
    *("start.filled", "start.replaced"),
)
Say = Callable[[str], None]
ENDPOINT = "we_" + "00" * 12


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class ArmedStore(Store):
    """Dies at a point of writing what has such a delivery in it."""

    armed = "-"

    def write(self, changes: Any) -> None:
        self._pass(f"{self._step(changes)}.before")
        super().write(changes)
        self._pass(f"{self._step(changes)}.after")

    def _attach(self, path: Path) -> None:
        super()._attach(path)
        begin = self._env.begin

        class Env:
            def __getattr__(env, name: str) -> Any:
                return getattr(inner, name)

            def begin(env, **more: Any) -> Any:
                return Transaction(begin(**more))

        outer, inner = self, self._env

        class Transaction:
            def __init__(self, txn: Any) -> None:
                self._txn = txn

            def __enter__(self) -> Any:
                self._bound = self._txn.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                self._txn.__exit__(*error)

            def put(self, name: bytes, value: bytes, db: Any) -> None:
                self._bound.put(name, value, db=db)
                if db is outer._tables[Table.BODIES] and outer.armed == "accept.inside":
                    die()

            def delete(self, name: bytes, db: Any) -> None:
                self._bound.delete(name, db=db)

        self._env = Env()

    def _fill(self, changes: Any, keep: bool) -> Path | None:
        listed = list(changes)
        replace = Path.replace
        if listed and self.armed == "start.filled":
            Path.replace = lambda *names: die()  # type: ignore[assignment, method-assign]
        try:
            kept = super()._fill(listed, keep)
        finally:
            Path.replace = replace  # type: ignore[method-assign]
        if listed:
            self._pass("start.replaced")
        return kept

    @staticmethod
    def _step(changes: list[Change]) -> str:
        found = [_delivery(content) for table, _, content in changes if table is Table.DELIVERIES and content]
        states = [delivery.state for delivery in found if delivery.kind is Kind.TOOL]
        if State.PENDING in states:
            return "accept"
        if State.ENDED in states:
            return "end"
        if State.LOGGED in states:
            return "acknowledge"
        return "publish" if any(delivery.state is State.PENDING for delivery in found) else "nothing"

    def _pass(self, point: str) -> None:
        if point == self.armed:
            die()


def _delivery(content: bytes) -> Delivery:
    return msgspec.msgpack.decode(content, type=Delivery)


class ArmedSender:
    def __init__(self, sender: HttpSender, armed: str) -> None:
        self.sender, self.armed = sender, armed

    async def send(self, post: Any) -> Reply:
        if self.armed == "attempt.before" and post.wants_body:
            die()
        reply = await self.sender.send(post)
        if self.armed == "attempt.after" and post.wants_body:
            die()
        return reply


async def main(say: Say, folder: str, port: int, secret: str, armed: str, *events: str) -> None:
    ArmedStore.armed = armed
    clock = LoopTime()
    policy = AddressPolicy(allow_private=True)
    keys = [os.urandom(32), key_of(secret), bytes(12)]  # callbacks', the endpoint's, its name

    def draw(size: int) -> bytes:
        return keys.pop(0)

    box = Outbox(Path(folder), policy, clock.now, random_bytes=draw, open_store=ArmedStore)
    if ENDPOINT not in box.ledger.endpoints:
        await box.create_endpoint("ann", "hook", f"http://127.0.0.1:{port}/good", ["t"])
    courier = Courier(box, ArmedSender(HttpSender(policy, SystemResolver()), armed), clock)
    courier.start()
    owed = {delivery.event for delivery in (*box.ledger.pending(), *box.ledger.unacknowledged())}
    for event in events:
        await courier.call(ENDPOINT, event, "t", event.encode(), clock.now() + 60)
        if armed == "accepted.untold":
            die()
        say(f"accepted {event}")
        owed.add(event)
    while owed:
        told = await courier.outcomes.get()
        if armed == "end.untold":
            die()
        assert isinstance(told, Outcome)
        say(f"ended {told.key.event} {type(told.ending).__name__}")
        if armed == "told.unacknowledged":
            die()
        courier.acknowledge(told.key)
        owed.discard(told.key.event)
    await courier.close()
    await box.close()


def run(*args: Any) -> None:
    asyncio.run(main(*args))
