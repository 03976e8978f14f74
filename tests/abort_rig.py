"""A core on the real executor, the real mover and real stores, brought into any state and held there."""

from __future__ import annotations

import math
import random
import select
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentserve.clock import VirtualClock, WallClock
from agentserve.core.engine import EngineCore
from agentserve.core.market import TierParts, TierSetup
from agentserve.core.plan import Plan
from agentserve.core.states import Phase
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import SamplerPort, TorchExecutor
from agentserve.messages import Close, ResetPrefixCache
from agentserve.models.decoder import Decoder
from agentserve.server.workers.exchange import Exchange, Tiering
from agentserve.server.workers.recorder import Recorder
from agentserve.sim.mover import FixedPrices
from agentserve.types import SessionId
from tests.engines import PRICES, Rig
from tests.mover_rig import PATIENCE, Gate
from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Signal
from tiering.stores.disk import DiskStore
from tiering.stores.host import HostStore
from tiering.stores.mover import Mover
from tiering.stores.pages import PoolPages
from tiering.types import Tier

PAGE = 16
HOST_SLOTS = 12
VOCAB = 96
PROMPT = 80  # tokens: five pages
PROMPTS = [random.Random(number).choices(range(3, VOCAB), k=PROMPT) for number in range(4)]
BUDGET = 32  # tokens of a step: a prompt takes three
MOMENT = 0.001  # seconds that a step takes


class Told:
    """A policy that does with every session what the test says."""

    name = "told"

    def __init__(self) -> None:
        self.choice = Choice.HOLD
        self.eager = False
        self.cheap: set[str] = set()  # sessions whose blocks go first

    def parked(self, park: Park) -> None: ...

    def resumed(self, session: str, at: float, waited: float) -> None: ...

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None: ...

    def gone(self, session: str, at: float, why: Departure) -> None: ...

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        return Decision(self.choice, math.inf, "so it was told")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        return 0.0 if session in self.cheap else 1.0

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (arrived,)


class RealRig(Rig):
    """Steps and transfers are real, time is not: nothing is late unless the test lets time pass."""

    def __init__(
        self, folder: Path, decoder: Decoder, sampler: SamplerPort, pages: int = 40, **config: object
    ) -> None:
        groups = len(decoder.config.layer_groups())
        self.pool = KVPool(decoder.config, [pages] * groups, PAGE, decoder.dtype)
        for storage in self.pool.storages:
            storage.fill_(float("nan"))  # what nobody wrote must not be read
        device = PoolPages(self.pool.storages)
        self.gate = Gate()
        self.policy = Told()
        self.host = HostStore(HOST_SLOTS, device.block_bytes)
        self.disk = DiskStore(folder, b"n" * 32, 4 << 20, device.block_bytes, page_size=PAGE, fault=self.gate)
        self.mover = Mover(device, self.host, self.disk, WallClock(), fault=self.gate)
        prices = msgspec.structs.replace(PRICES, block_bytes=device.block_bytes, page_size=PAGE)
        setup = TierSetup("told", HOST_SLOTS, self.disk.room, device.block_bytes, prices)
        super().__init__(
            (pages,) * groups,
            executor=TorchExecutor(decoder, self.pool, sampler),
            tiers=TierParts(setup, self.policy, FixedPrices(prices)),
            page_size=PAGE,
            max_batched_tokens=BUDGET,
            **config,
        )
        self.clock = VirtualClock()
        tiering = Tiering(self.core, self.mover, self.disk.close)
        self.exchange = Exchange(tiering, self.clock, Recorder(None))

    # --- what the worker's loop does ---------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.move()

    def move(self) -> None:
        self.clock.advance_to(self.now)
        self.exchange.take_in()
        self.exchange.hand_out()
        self._collect()

    def begin(self) -> Plan | None:
        """A step's plan; its result is not there yet."""
        self.now += MOMENT
        self.move()
        plan = self.core.begin_step(self.now)
        self.exchange.hand_out()
        self.core.check()
        return plan

    def finish(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.core.finish_step(self.executor.run(plan), self.now)
        self.exchange.hand_out()
        self._collect()

    def step(self) -> Plan | None:
        plan = self.begin()
        if plan is not None:
            self.finish(plan)
        return plan

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert self.step() is not None

    def drain(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.core.has_work:
                return
            if self.step() is None:
                assert self.mover.pending, "there is work, but nothing can run or arrive: wedged"
                self.await_transfer()
        raise AssertionError("the engine did not finish")

    def await_transfer(self) -> None:
        assert select.select([self.mover.fileno()], [], [], PATIENCE)[0], "no transfer ends"
        self.move()

    def settle(self) -> None:
        """Let every transfer end, and those that follow from it."""
        self.gate.release()
        self.pass_time(0.1)  # what a turn's end means is not waited for any longer
        while self.mover.pending:
            self.await_transfer()

    # --- the ends ----------------------------------------------------------------------------

    def phase(self, name: str) -> Phase:
        session = self.core.sessions.get(SessionId(name))
        assert session is not None
        return session.phase

    def turn(self, name: str, tokens: Sequence[int], count: int = 2) -> list[int]:
        """One whole turn; what it said."""
        number = self.submit(name, tokens, max_tokens=count)
        self.drain()
        return self.output(name, number)

    def at_rest(self) -> None:
        """Nothing is live, pinned, staged or under way, and each page and slot is there once."""
        core = self.core
        assert not core.has_work
        assert core.view().pages_live == 0
        assert [pool.live for pool in core.kv.pools] == [0] * len(core.kv.pools)
        assert (core.kv.moving, core.kv.pinned, self.tiers.manager.moving) == (0, 0, 0)
        assert self.mover.pending == 0
        assert not self.tiers.restores.under_way
        assert self.tiers.restores.promised == 0
        core.check()  # free lists: each page and each host slot once

    def empty(self) -> None:
        """With every session gone and the cache dropped, all there is is free."""
        for session in list(self.core.sessions):
            self.core.handle(Close(session.id), self.now)
        self.core.handle(ResetPrefixCache(0), self.now)
        self.settle()
        self.at_rest()
        assert all(pool.free == pool.pages for pool in self.core.kv.pools)
        manager = self.tiers.manager
        assert (manager.host_used, manager.disk_used, self.disk.used) == (0, 0, 0)
        tiers = self.tiers
        for owner in (tiers.ledger, tiers.restores, tiers.spills, self.core.kv, self.core.sessions):
            for name, book in vars(owner).items():
                assert not isinstance(book, dict) or not book, f"{name} remembers {book}"
        self.events.clear()
        self.plans.clear()
        self._turns.clear()

    @property
    def tiers(self):  # type: ignore[no-untyped-def]
        assert isinstance(self.core, EngineCore)
        assert self.core.tiers is not None
        return self.core.tiers

    def close(self) -> None:
        self.gate.release()
        self.exchange.close(PATIENCE)
