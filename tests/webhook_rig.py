"""Webhooks without a network, a disk or a clock that moves by itself."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque

from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.courier import Courier, CourierSettings
from tools_bridge.webhooks.outbox import Outbox
from tools_bridge.webhooks.replies import Answered
from tools_bridge.webhooks.signing import verify

START = 1_800_000_000.0


class VirtualTime:
    """Moves when `pass_by` is called; then timers go off in order, each with all that follows from it."""

    def __init__(self, start=START):
        self._now = start
        self.skew = 0.0  # of the wall clock
        self._timers = []
        self._numbers = itertools.count()

    def now(self):
        return self._now

    def unix(self):
        return self._now + self.skew

    def later(self, seconds, call):
        timer = [self._now + seconds, next(self._numbers), call]
        heapq.heappush(self._timers, timer)

        def cancel():
            timer[2] = None

        return cancel

    async def pass_by(self, seconds):
        await settle()
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            at, _, call = heapq.heappop(self._timers)
            self._now = max(self._now, at)
            if call is not None:
                call()
                await settle()
        self._now = end
        await settle()


async def settle(rounds=30):
    """Whatever can happen without time passing and without a thread has happened."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class ScriptedSender:
    """Answers by URL from a script, then with 200; holds attempts to the URLs in `held`."""

    def __init__(self, clock=None):
        self.clock = clock
        self.posts = []
        self.script = {}
        self.held = {}
        self.running = 0
        self.most = 0

    def answer(self, url, *replies):
        self.script.setdefault(url, deque()).extend(replies)

    def hold(self, url):
        self.held[url] = asyncio.Event()

    def release(self, url):
        self.held.pop(url).set()

    async def send(self, post):
        self.posts.append(post)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if post.url in self.held:
                await self.held[post.url].wait()
            script = self.script.get(post.url)
            reply = script.popleft() if script else Answered(200)
            return reply() if callable(reply) else reply
        finally:
            self.running -= 1

    def ids(self, url=None):
        return [post.headers["webhook-id"] for post in self.posts if url is None or post.url == url]


def result(text, **more):
    """A tool's answer."""
    import msgspec

    return Answered(200, content_type="application/json", body=msgspec.json.encode({"output": text} | more))


class Desk:
    """An outbox, a courier, and whom they deliver to. `store` instead of `folder`: what it is kept in."""

    def __init__(
        self, folder=None, limits=None, settings=None, draw=lambda: 0.5, clock=None, sender=None, store=None
    ):
        self.clock = clock or VirtualTime()
        self.sender = sender or ScriptedSender(self.clock)
        kept = {} if store is None else {"open_store": lambda folder: store}
        folder = folder if store is None else "folder"
        self.outbox = Outbox(folder, AddressPolicy(), self.clock.now, limits, **kept)
        self.courier = Courier(self.outbox, self.sender, self.clock, settings or CourierSettings(), draw)
        self.secrets = {}

    async def endpoint(self, name="tools", types=("tool.call",), owner="ann"):
        endpoint, secret = await self.outbox.create_endpoint(
            owner, name, f"https://{name}.example/hook", types
        )
        self.secrets[endpoint.id] = [secret]
        return endpoint

    def told(self):
        """Outcomes so far."""
        found = []
        while not self.courier.outcomes.empty():
            found.append(self.courier.outcomes.get_nowait())
        return found

    async def call(self, endpoint, event="msg_1", seconds=60.0, body=b'{"n":1}'):
        await self.courier.call(endpoint.id, event, "tool.call", body, self.clock.now() + seconds)

    def verified(self, post, secrets):
        return verify(secrets, post.headers, post.body, self.clock.unix())

    async def close(self):
        await self.courier.close()
        await self.outbox.close()
