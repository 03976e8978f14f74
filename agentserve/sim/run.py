"""The simulation: the server's own core under a virtual clock.

Time moves only between events. An arrival or a tool result is a `Submit`; a step takes as long as
the cost model says. An empty event heap with an unfinished agent is a deadlock, and is reported.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from itertools import count

import msgspec

from agentserve.clock import VirtualClock
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.core.market import TierParts
from agentserve.core.record import (
    RECORD_VERSION,
    Commanded,
    Entry,
    Finished,
    Opened,
    Ordered,
    Planned,
    Ticked,
    Transferred,
    orders_digest,
    plan_digest,
)
from agentserve.messages import Command, Park, Submit, Token, TurnEnded, pack_tokens
from agentserve.sim.executor import SimExecutor
from agentserve.sim.mover import Faults, SimMover
from agentserve.sim.workload import Agent, as_tokens
from agentserve.types import FinishReason, KVGroup, Sampling, SessionId, TurnId


class TurnRecord(msgspec.Struct, frozen=True):
    """One finished turn; times in virtual seconds."""

    agent: str
    turn: int
    reason: FinishReason
    arrived: float
    first_token: float
    ended: float
    prompt: int
    cached: int
    computed: int
    preemptions: int
    output: tuple[int, ...]

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrived


class Outcome(msgspec.Struct, frozen=True):
    turns: tuple[TurnRecord, ...]
    unfinished: tuple[str, ...]  # agents that never finished: a wedge
    steps: int
    seconds: float  # virtual
    digests: tuple[bytes, ...]  # one per plan


class Wedged(AssertionError):
    """There is work, but nothing can run."""


class Simulation:
    """One core, one executor, agents as clients."""

    def __init__(
        self,
        agents: tuple[Agent, ...],
        config: CoreConfig,
        *,
        pages: int,
        cost: StepCost,
        log: Callable[[Entry], None] | None = None,
        check_every_step: bool = False,
        tiers: TierParts | None = None,
        faults: Faults | None = None,
    ) -> None:
        """tiers: what is below the device, moved at the setup's prices, with `faults`; None: nothing."""
        groups = (KVGroup("full", (0,), 1),)
        self.core = EngineCore(config, groups, (pages,), cost, tiers)
        self.executor = SimExecutor((pages,), config.page_size, cost)
        self.mover = SimMover(self.executor.memory, tiers.setup.prices, faults) if tiers else None
        self.clock = VirtualClock()
        self._agents = {agent.name: agent for agent in agents}
        self._contexts = {agent.name: array("i") for agent in agents}
        self._outputs: dict[str, list[int]] = {agent.name: [] for agent in agents}
        self._left = {agent.name: len(agent.turns) for agent in agents}
        self._heap: list[tuple[float, int, str]] = []  # (time, tie-break, agent whose next turn begins)
        self._order = count()
        self._turns: list[TurnRecord] = []
        self._digests: list[bytes] = []
        self._log = log
        self._check = check_every_step
        setup = tiers.setup if tiers is not None else None
        if log is not None:
            log(Opened(RECORD_VERSION, msgspec.msgpack.encode(config), groups, (pages,), cost, setup))
        for agent in agents:
            self._at(agent.arrives, agent.name)

    def run(self) -> Outcome:
        """Until every agent has finished. Raises Wedged if the engine stands still with work to do."""
        while self._heap or self.core.has_work:
            self._arrivals()
            self._move()
            if not self.core.has_work:
                self._wait(self._heap[0][0] if self._heap else None)
            elif not self._step():
                if self.mover is not None:
                    self._hand_over(self.mover, self.clock.now())  # the step may have ordered a load
                if self.mover is None or not self.mover.pending:
                    raise Wedged(f"{len(self.core.scheduler.waiting)} turns wait and nothing can run")
                self._wait(self._heap[0][0] if self._heap else None)
        self.settle()
        unfinished = tuple(name for name, left in self._left.items() if left)
        return Outcome(
            tuple(self._turns), unfinished, len(self._digests), self.clock.now(), tuple(self._digests)
        )

    def _at(self, when: float, agent: str) -> None:
        heapq.heappush(self._heap, (when, next(self._order), agent))

    def _handle(self, command: Command) -> None:
        now = self.clock.now()
        if self._log is not None:
            self._log(Commanded(now, command))
        self.core.handle(command, now)

    def _arrivals(self) -> None:
        while self._heap and self._heap[0][0] <= self.clock.now():
            name = heapq.heappop(self._heap)[2]
            agent, context = self._agents[name], self._contexts[name]
            number = len(agent.turns) - self._left[name]
            turn = agent.turns[number]
            context.extend(as_tokens(turn.append))
            sampling = Sampling(temperature=0.0, max_tokens=turn.output, ignore_eos=True)
            submit = Submit(SessionId(name), TurnId(number + 1), pack_tokens(context), sampling)
            self._handle(submit)
        self._collect()

    def settle(self) -> None:
        """Let every transfer in flight end."""
        self._move()
        while self.mover is not None and self.mover.pending:
            self._wait(None)
            self._move()

    def _wait(self, arrival: float | None) -> None:
        """Let time pass until the next thing happens: an arrival, a transfer's end, a timer."""
        times = [arrival, self.core.next_timer(), self.mover.next_done() if self.mover else None]
        due = [time for time in times if time is not None]
        if due:
            self.clock.advance_to(max(self.clock.now(), min(due)))

    def _move(self) -> None:
        """What a worker's loop does for tiers between steps."""
        if self.mover is None:
            return
        now = self.clock.now()
        self._hand_over(self.mover, now)
        done = tuple(self.mover.poll(now))
        if done:
            if self._log is not None:
                self._log(Transferred(now, done))
            self.core.finish_transfers(done, now)
        timer = self.core.next_timer()
        if timer is not None and timer <= now:
            if self._log is not None:
                self._log(Ticked(now))
            self.core.tick(now)
        self._hand_over(self.mover, now)
        self._collect()

    def _hand_over(self, mover: SimMover, now: float) -> None:
        transfers, changes = self.core.take_transfers(), self.core.take_changes()
        if (transfers or changes) and self._log is not None:
            self._log(Ordered(orders_digest(transfers, changes)))
        for transfer in transfers:
            mover.submit(transfer, now)
        for change in changes:
            mover.change(change, now)

    def _step(self) -> bool:
        """One plan, if something can run."""
        began = self.clock.now()
        plan = self.core.begin_step(began)
        if self._log is not None:
            self._log(Planned(began, plan_digest(plan)))
        if plan is None:
            return False
        self._digests.append(plan_digest(plan))
        result = self.executor.run(plan)
        self.clock.advance_to(began + result.seconds)
        if self._log is not None:
            self._log(Finished(self.clock.now(), result))
        self.core.finish_step(result, self.clock.now())
        self._collect()
        if self._check:
            self.core.check()
        return True

    def _collect(self) -> None:
        for event in self.core.take_events():
            if isinstance(event, Token):
                self._outputs[event.session].append(event.token)
            elif isinstance(event, TurnEnded):
                self._ended(event)

    def _ended(self, event: TurnEnded) -> None:
        name, usage = event.session, event.usage
        output, self._outputs[name] = self._outputs[name], []
        self._turns.append(
            TurnRecord(
                name,
                event.turn,
                event.reason,
                usage.arrived,
                usage.first_token,
                usage.ended,
                usage.prompt,
                usage.cached,
                usage.computed,
                usage.preemptions,
                tuple(output),
            )
        )
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._left[name] = 0  # refused: this agent gives up, visibly, with its reason recorded
            return
        self._contexts[name].extend(output)
        agent = self._agents[name]
        wait = agent.turns[len(agent.turns) - self._left[name]].wait
        self._left[name] -= 1
        if self._left[name]:
            self._handle(Park(event.session, event.turn, waiting_tool=True))
            self._at(self.clock.now() + wait, name)
