"""Webhooks through any history: kills at any transaction, rotations, failures of every kind.

The disk is a list of transactions. A kill keeps what was synced when somebody was last promised something,
and any part of what came after it.
"""

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_webhook_store import MemoryDisk
from tests.webhook_rig import VirtualTime, result, settle
from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.breaker import BreakerSettings
from tools_bridge.webhooks.courier import Courier, CourierSettings
from tools_bridge.webhooks.lanes import Places
from tools_bridge.webhooks.ledger import OutboxLimits
from tools_bridge.webhooks.outbox import Outbox
from tools_bridge.webhooks.replies import Answered, Failed, Fault
from tools_bridge.webhooks.signing import verify
from tools_bridge.webhooks.types import Disabled, Key, State, WebhookError

LIMITS = OutboxLimits(
    endpoints=4, endpoints_of_owner=4, owed=30, owed_to_endpoint=12,
    logged=12, logged_of_endpoint=6, logged_bytes=60,
)  # fmt: skip
SETTINGS = CourierSettings(
    places=Places(each=2, all=5, owner=3), breaker=BreakerSettings(failures=3, cooldown=20.0)
)
OWNERS = ["ann", "bob"]
REPLIES = [
    *(Answered(200), Answered(204), result("x"), result("y"), Answered(500), Answered(302), Answered(410)),
    *(Answered(429, retry_after="30"), Answered(503, retry_after="7"), Answered(200, body=b"garbage")),
    *(Failed(Fault.CONNECT), Failed(Fault.TIMEOUT), Failed(Fault.REFUSED), Failed(Fault.TOO_LARGE, "", 200)),
]


class Disk(MemoryDisk):
    def __init__(self, groups=()):
        super().__init__()
        for group in groups:
            super().write(group)
        self.found = [(table, name, content) for (table, name), content in self.records.items()]
        self.damages = []

    def close(self):
        pass


class Receivers:
    """Check every signature, take their time, and answer anything."""

    def __init__(self, world, choose):
        self.world, self.choose, self.kind = world, choose, False
        self.got = []

    async def send(self, post):
        world = self.world
        endpoint = next(name for name in world.secrets if post.url.endswith(name))
        now = world.clock.unix()
        active = [secret for secret, until in world.secrets[endpoint] if until is None or now < until]
        event = verify(active, post.headers, post.body, now)
        assert post.body == event.encode()
        assert post.seconds > 0
        self.got.append(Key(world.ids[endpoint], event))
        if self.kind:
            return result("kind")
        reached = asyncio.Event()
        world.clock.later(self.choose.choice([0.0, 0.0, 2.0, 15.0]), reached.set)
        await reached.wait()
        return self.choose.choice(REPLIES)


class World:
    def __init__(self, seed):
        self.choose = random.Random(seed)
        self.clock = VirtualTime()
        self.receivers = Receivers(self, self.choose)
        self.secrets = {}  # endpoint's name: (secret, until)
        self.ids = {}
        self.deleted = set()
        self.calls, self.events = set(), set()  # that were accepted
        self.withdrawn = set()
        self.acknowledged = set()
        self.told = {}  # key: endings, over all lives
        self.disk = Disk()
        self.synced = 0  # transactions that somebody was promised something by
        self.begin()

    def begin(self):
        self.box = Outbox(
            "folder",
            AddressPolicy(),
            self.clock.now,
            LIMITS,
            open_store=lambda folder: self.disk,
            patience=600,
        )
        self.courier = Courier(self.box, self.receivers, self.clock, SETTINGS, self.choose.random)
        self.courier.start()
        self.told_now = set()

    async def step(self, act, number, seconds):
        with suppress(WebhookError):
            await getattr(self, act)(number)
        await self.rest(seconds)

    async def rest(self, seconds):
        await self.clock.pass_by(seconds)
        for _ in range(3):
            await self.box.kept()
            await settle()
        while not self.courier.outcomes.empty():
            self.hear(self.courier.outcomes.get_nowait())
        self.box.ledger.check()
        self.courier._lanes.check()
        pending = {delivery.key for delivery in self.box.ledger.pending()}
        lanes = {key for lane in self.courier._lanes._lanes.values() for key in lane.entries}
        assert pending == lanes  # nothing is forgotten

    def hear(self, told):
        if isinstance(told, Disabled):
            return
        assert told.key in self.calls
        assert told.key not in self.told_now  # once in each life
        assert told.key not in self.withdrawn
        self.told_now.add(told.key)
        self.told.setdefault(told.key, []).append(told.ending)

    # --- what happens -----------------------------------------------------------------

    def some(self, number):
        names = sorted(name for name in self.ids if name not in self.deleted)
        return names[number % len(names)] if names else "none"

    async def create(self, number):
        name = f"e{len(self.ids)}"
        url = f"https://a.example/{name}"
        endpoint, secret = await self.box.create_endpoint(OWNERS[number % 2], name, url, ["t"])
        self.secrets[name], self.ids[name] = [(secret, None)], endpoint.id
        self.synced = len(self.disk.groups)

    async def call(self, number):
        key = Key(self.ids.get(self.some(number), "none"), f"c{number}")
        if key in self.calls:
            return
        await self.courier.call(*key, "t", key.event.encode(), self.clock.now() + 5 + number % 300)
        self.calls.add(key)
        self.synced = len(self.disk.groups)

    async def publish(self, number):
        event = f"e{number}"
        if any(key.event == event for key in self.events):
            return
        for endpoint in await self.courier.publish(OWNERS[number % 2], event, "t", event.encode()):
            self.events.add(Key(endpoint, event))
        self.synced = len(self.disk.groups)

    async def rotate(self, number):
        name = self.some(number)
        keep = float(number % 3) * 20
        now = self.clock.now()
        _, secret = await self.box.rotate_secret(self.ids.get(name, "none"), keep)
        old = [
            (text, now + keep if until is None else min(until, now + keep))
            for text, until in self.secrets[name]
        ]
        self.secrets[name] = [(secret, None), *old]
        self.synced = len(self.disk.groups)

    async def disable(self, number):
        await self.courier.disable(self.ids.get(self.some(number), "none"), "by an operator")

    async def enable(self, number):
        await self.courier.enable(self.ids.get(self.some(number), "none"))
        self.synced = len(self.disk.groups)

    async def delete(self, number):
        name = self.some(number)
        if number % 3 == 0 and name in self.ids:
            await self.courier.delete(self.ids[name])
            self.deleted.add(name)
            self.synced = len(self.disk.groups)

    async def withdraw(self, number):
        calls = sorted(self.calls)
        if calls:
            key = calls[number % len(calls)]
            if await self.courier.withdraw(key):
                self.withdrawn.add(key)
                self.synced = len(self.disk.groups)
            else:
                self.acknowledged.add(key)

    async def acknowledge(self, number):
        for key in sorted(self.told):
            if number % 2:
                self.courier.acknowledge(key)
                self.acknowledged.add(key)

    async def replay(self, number):
        logged = [
            each.key for name in sorted(self.ids) for each in self.box.ledger.of_endpoint(self.ids[name])
        ]
        if logged:
            await self.courier.replay(logged[number % len(logged)])

    async def restart(self, number):
        await self.courier.close()
        await self.box.close()
        self.disk = Disk(self.disk.groups)
        self.again()

    async def kill(self, number):
        await self.courier.close()  # tasks end where they are; nothing is written
        await self.box.kept()
        groups = self.disk.groups
        kept = self.synced + number % (len(groups) - self.synced + 1)
        self.box._writer.close(60)
        self.disk = Disk(groups[:kept])
        self.again()

    def again(self):
        self.begin()
        self.synced = len(self.disk.groups)
        assert self.box.skipped == 0
        # What was accepted is there, or is over: it was heard of, withdrawn, or in a log that is bounded.
        for key in self.calls - self.withdrawn - self.acknowledged:
            assert self.box.ledger.find(key) is not None, key

    async def end(self):
        """Receivers become kind, and all that is owed ends."""
        self.receivers.kind = True
        for _ in range(200):
            await self.rest(3600.0)
            if not self.courier.owed:
                break
        assert self.courier.owed == 0
        assert self.box.ledger.pending() == []
        assert self.calls - self.withdrawn <= self.told.keys() <= self.calls
        for key in self.told:
            self.courier.acknowledge(key)
        await self.box.kept()
        assert self.box.ledger.unacknowledged() == []
        for _, delivery in self.box.ledger.everything():
            if hasattr(delivery, "state"):
                assert delivery.state is State.LOGGED
        await self.courier.close()
        await self.box.close()


ACTS = ["create", *["call"] * 6, "publish", "publish", "rotate", "disable", *["enable"] * 3, "delete"]
ACTS += ["withdraw", "acknowledge", "replay", "restart", "kill", "kill"]
STEP = st.tuples(st.sampled_from(ACTS), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 3.0, 40.0, 400.0]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(STEP, max_size=30))
def test_every_delivery_ends_once_whatever_happens(seed, steps):
    async def live():
        world = World(seed)
        await world.step("create", 0, 0.0)
        await world.step("create", 0, 0.0)
        for step in steps:
            await world.step(*step)
        await world.end()

    asyncio.run(live())


@pytest.mark.parametrize("seed", range(12))
def test_long_histories(seed):
    async def live():
        choose, world = random.Random(seed), World(seed)
        for act in ["create", "create"]:
            await world.step(act, 0, 0.0)
        for _ in range(250):
            await world.step(
                choose.choice(ACTS), choose.randrange(2**16), choose.choice([0.0, 0.0, 0.5, 3.0, 40.0, 400.0])
            )
        await world.end()
        assert len(world.told) > 5
        assert len(world.receivers.got) > 20

    asyncio.run(live())
