"""Helpers of the core's tests: a core with the proving executor, driven step by step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from random import Random

from agentserve.core.ahead import SHARE
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import CoreEvent, EngineCore
from agentserve.core.market import TierParts, TierSetup
from agentserve.core.plan import Plan
from agentserve.core.ports import Executor
from agentserve.core.tiers import Tiers
from agentserve.messages import Submit, Token, TurnEnded, pack_tokens
from agentserve.sim.executor import SimExecutor, fingerprint, mix, next_token
from agentserve.sim.mover import Faults, FixedPrices, SimMover
from agentserve.types import NO_SLO, KVGroup, Sampling, SessionId, Slo, TurnId
from tiering.manager import HEADER_BYTES
from tiering.policy.base import (
    Choice,
    Decision,
    Departure,
    Hints,
    Market,
    Park,
    Policy,
    Prices,
    Residency,
    Signal,
)
from tiering.policy.lru import LruPolicy
from tiering.types import Change, Tier, Transfer

VOCAB = 1000


def groups_of(count: int) -> tuple[KVGroup, ...]:
    return tuple(KVGroup(f"g{g}", (g,), 1024) for g in range(count))


class Rig:
    """One core and one executor (the proving one if none is given); every step is checked."""

    def __init__(
        self,
        pages: Sequence[int] = (32,),
        vocab: int = VOCAB,
        executor: Executor | None = None,
        cost: StepCost | None = None,
        tiers: TierParts | None = None,
        **config: object,
    ) -> None:
        self.config = CoreConfig(**{"page_size": 4, "max_batched_tokens": 64, **config})  # type: ignore[arg-type]
        self.core = EngineCore(self.config, groups_of(len(pages)), tuple(pages), cost, tiers)
        self.executor = executor or SimExecutor(
            tuple(pages), self.config.page_size, cost or StepCost(), vocab
        )
        self.vocab = vocab
        self.now = 0.0
        self.events: list[CoreEvent] = []
        self.plans: list[Plan] = []
        self._turns: dict[str, int] = {}
        self.submits: dict[str, Submit] = {}  # the last of each session

    def submit(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        priority: int = 0,
        tenant: str = "",
        program: str = "",
        slo: Slo = NO_SLO,
        shed: bool = False,
        **sampling: object,
    ) -> TurnId:
        turn = TurnId(self._turns.get(name, 0) + 1)
        self._turns[name] = turn
        settings = Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        packed = pack_tokens(array("i", tokens))
        submit = Submit(
            SessionId(name),
            turn,
            packed,
            settings,
            priority=priority,
            tenant=tenant,
            program=program,
            slo=slo,
            shed=shed,
        )
        self.submits[name] = submit
        self.core.handle(submit, self.now)
        self._collect()
        return turn

    def _collect(self) -> None:
        self.events.extend(self.core.take_events())
        self.core.check()

    def step(self) -> Plan | None:
        self.now += 1.0
        plan = self.core.begin_step(self.now)
        self.core.check()
        if plan is not None:
            self.plans.append(plan)
            self._check_ahead(plan)
            self.core.finish_step(self.executor.run(plan), self.now)
        self._collect()
        return plan

    def _check_ahead(self, plan: Plan) -> None:
        """What is computed for sessions at rest costs nobody a step (INV-44)."""
        sessions = [self.core.sessions.get(chunk.session) for chunk in plan.chunks]
        ahead = [
            chunk
            for chunk, session in zip(plan.chunks, sessions, strict=True)
            if session is None or session.turn is None
        ]
        if ahead:
            assert not self.core.scheduler.waiting, "computed ahead while somebody waits"
            (chunk,) = ahead
            assert chunk is plan.chunks[-1]
            assert chunk.sample is None
            most = max(self.config.max_batched_tokens // SHARE, self.config.page_size)
            assert 0 < len(chunk.tokens) <= most

    def drain(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.core.has_work:
                return
            assert self.step() is not None, "there is work, but nothing can run: wedged"
        raise AssertionError("the engine did not finish")

    def output(self, name: str, turn: int = 1) -> list[int]:
        return [e.token for e in self.events if isinstance(e, Token) and (e.session, e.turn) == (name, turn)]

    def ended(self, name: str, turn: int = 1) -> TurnEnded:
        found = [e for e in self.events if isinstance(e, TurnEnded) and (e.session, e.turn) == (name, turn)]
        assert len(found) == 1, f"{name}/{turn} ended {len(found)} times"
        return found[0]


BLOCK_BYTES = 1000
PRICES = Prices(
    block_bytes=BLOCK_BYTES,
    save=(0.001, 0.001),
    load=(0.001, 0.001),
    write=(0.005, 0.005),
    fetch=(0.002, 0.002),
    prefill=(0.0, 0.01, 0.0),
    page_size=4,
)


def tier_parts(
    host: int,
    disk_blocks: int = 0,
    policy: Policy | None = None,
    *,
    staging: bool = False,
    peers: bool = False,
) -> TierParts:
    chosen = policy or LruPolicy()
    disk = disk_blocks * (BLOCK_BYTES + HEADER_BYTES)
    setup = TierSetup(chosen.name, host, disk, BLOCK_BYTES, PRICES, staging=staging, peers=peers)
    return TierParts(setup, chosen, FixedPrices(PRICES))


class TierRig(Rig):
    """A core with tiers and a mover of fingerprints; a step takes `pace` seconds."""

    def __init__(
        self,
        pages: Sequence[int] = (32,),
        *,
        host: int = 64,
        disk: int = 0,
        policy: Policy | None = None,
        faults: Faults | None = None,
        pace: float = 0.01,
        staging: bool = False,
        peers: Sequence[TierRig] = (),
        **config: object,
    ) -> None:
        parts = tier_parts(host, disk, policy, staging=staging, peers=bool(peers))
        super().__init__(pages, tiers=parts, **config)  # type: ignore[arg-type]
        assert isinstance(self.executor, SimExecutor)
        self.mover = SimMover(self.executor.memory, PRICES, faults, [peer.mover for peer in peers])
        self.pace = pace
        self.orders: list[Transfer] = []
        self.changes: list[Change] = []

    @property
    def tiers(self) -> Tiers:
        assert self.core.tiers is not None
        return self.core.tiers

    def move(self) -> None:
        """What the worker's loop does between steps."""
        self._hand_over()
        self.core.finish_transfers(self.mover.poll(self.now), self.now)
        timer = self.core.next_timer()
        if timer is not None and timer <= self.now:
            self.core.tick(self.now)
            left = self.core.next_timer()
            assert left is None or left > self.now, "a tick serves what is due: else the loop would spin"
        self._hand_over()
        self._collect()

    def _hand_over(self) -> None:
        for transfer in self.core.take_transfers():
            self.orders.append(transfer)
            self.mover.submit(transfer, self.now)
        for change in self.core.take_changes():
            self.changes.append(change)
            self.mover.change(change, self.now)

    def step(self) -> Plan | None:
        self.move()
        self.now += self.pace - 1.0  # the base adds a second
        plan = super().step()
        self.move()
        return plan

    def drain(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.core.has_work:
                return
            self.move()
            coming = self.mover.pending
            if self.step() is None:
                assert coming or self.mover.pending, "there is work, but nothing can run or arrive: wedged"
                if self.mover.pending:
                    self.wait()
        raise AssertionError("the engine did not finish")

    def wait(self) -> None:
        """Let time pass until something ends or is due."""
        times = [time for time in (self.mover.next_done(), self.core.next_timer()) if time is not None]
        self.now = max(self.now, min(times))
        self.move()

    def settle(self, seconds: float = 1.0) -> None:
        """Let every transfer end, and `seconds` pass."""
        self.now += seconds
        self.move()
        while self.mover.pending:
            self.wait()


def cold(tokens: Sequence[int], count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """What the imaginary model says after `tokens` with no engine at all: the oracle."""
    state, said = fingerprint(tokens), []
    for _ in range(count):
        token = next_token(state, seed, vocab)
        said.append(token)
        state = mix(state, token)
    return said


class WildPolicy:
    """Decides anything at any time, by seed: what a policy says must never make a difference to tokens."""

    name = "wild"
    eager = True

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def parked(self, park: Park) -> None: ...

    def resumed(self, session: str, at: float, waited: float) -> None:
        assert waited >= 0

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None: ...

    def gone(self, session: str, at: float, why: Departure) -> None: ...

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        assert min(residency.device, residency.host, residency.disk, residency.gone) >= 0
        assert 0 <= market.device_free <= market.device
        wait = self._rng.choice([0.0, 0.02, 1.0, math.inf])
        return Decision(self._rng.choice(list(Choice)), market.now + wait, "a whim")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        return self._rng.random()

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (arrived + self._rng.random(),)
