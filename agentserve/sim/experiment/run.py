"""One run: an engine core between clients and a machine, and what was recorded of it.

What a worker's loop does, without its socket. On an imagined machine time is virtual, on a real one it is
real; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentserve.core.engine import EngineCore
from agentserve.core.plan import Plan, StepResult
from agentserve.sim.experiment.clients import Clients
from agentserve.sim.experiment.fairness import INPUT, OUTPUT
from agentserve.sim.experiment.machine import Machine
from agentserve.sim.experiment.record import IterationRecord, RequestRecord
from tiering.types import Move, Transfer, TransferDone

PATIENCE = 600.0  # seconds without a step, while turns want one: a wedge
IDLE_ROUNDS = 10_000  # rounds in which neither time nor work moved: a wedge
LOOKS = 64  # iterations between looks at whether the run goes on
HOST_MOVES = (Move.SAVE, Move.LOAD)
INWARD, OUTWARD = (Move.LOAD, Move.FETCH, Move.BORROW), (Move.SAVE,)


class Standstill(RuntimeError):
    """Turns want a step, and none comes."""


@dataclass
class Recorded:
    """What a run left behind."""

    requests: list[RequestRecord] = field(default_factory=list)
    iterations: list[IterationRecord] = field(default_factory=list)
    copying: dict[str, float] = field(default_factory=dict)  # seconds by link: "host", "disk"
    stalled: float = 0.0  # seconds in which turns wanted a step and KV was on its way to them
    ended: float = 0.0  # the clock's last time
    counted: set[str] = field(default_factory=set)  # sessions after the warm-up
    cut: bool = False  # it was stopped before all sessions had ended
    most_attained: float = 1.0  # of a run that was cut: the share that could still have kept its promises


Enough = Callable[[Clients, float], bool]
"""Whether a run need not go on. Asked now and then."""


class Run:
    def __init__(
        self,
        core: EngineCore,
        machine: Machine,
        clients: Clients,
        *,
        tenants: Sequence[str],
        block_bytes: int,
        enough: Enough = lambda clients, now: False,
    ) -> None:
        """tenants: in the order of the records' tuples."""
        self._core = core
        self._machine = machine
        self._clients = clients
        self._tenants = tuple(tenants)
        self._number = {tenant: number for number, tenant in enumerate(self._tenants)}
        self._block_bytes = block_bytes
        self._enough = enough
        self._found = Recorded()
        self._moving: dict[int, Transfer] = {}
        self._swapped = [0, 0]  # bytes in and out since the last iteration
        self._idle_since = 0.0  # the device's last end of work
        self._rested = True  # nothing was to be computed since
        self._last_step = 0.0
        self._idle_rounds = 0

    def run(self) -> Recorded:
        """Until all sessions have ended, or it is enough. Raises Standstill."""
        looked = 0
        while True:
            now = self._machine.now()
            self._exchange(now)
            if self._clients.over and not self._core.has_work:
                break
            if len(self._found.iterations) >= looked + LOOKS:
                looked = len(self._found.iterations)
                if self._enough(self._clients, now):
                    self._found.cut = True
                    missed = self._clients.missed + self._clients.overdue(now)
                    self._found.most_attained = 1.0 - missed / self._clients.total
                    break
            if not (self._core.has_work and self._step(now)):
                self._rest(now)
        self._found.requests = self._clients.records
        self._found.counted = self._clients.counted
        self._found.ended = self._machine.now()
        return self._found

    # --- between steps -------------------------------------------------------------------------

    def _exchange(self, now: float) -> None:
        for command in self._clients.due(now):
            self._core.handle(command, now)
        done = self._machine.done()
        if done:
            self._moved(done)
            self._core.finish_transfers(done, now)
        timer = self._core.next_timer()
        if timer is not None and timer <= now:
            self._core.tick(now)
        self._events(now)

    def _events(self, now: float) -> None:
        for event in self._core.take_events():
            self._clients.heard(event, now)
        for command in self._clients.due(now):  # a turn's end is parked before anything else is planned
            self._core.handle(command, now)
        self._order()

    def _order(self) -> None:
        transfers, changes = self._core.take_transfers(), self._core.take_changes()
        if transfers or changes:
            self._moving |= {transfer.id: transfer for transfer in transfers}
            self._machine.order(transfers, changes)

    def _moved(self, done: Sequence[TransferDone]) -> None:
        for end in done:
            move = self._moving.pop(end.id).move
            size = sum(end.ok) * self._block_bytes
            self._swapped[0] += size * (move in INWARD)
            self._swapped[1] += size * (move in OUTWARD)
            link = "host" if move in HOST_MOVES else "disk"
            self._found.copying[link] = self._found.copying.get(link, 0.0) + end.seconds

    def _rest(self, now: float) -> None:
        """Nothing can be computed now."""
        wanted = self._core.has_work
        if wanted and now - self._last_step > PATIENCE:
            raise Standstill(f"at {now:.1f} s: no step for {PATIENCE:.0f} s, though turns want one")
        times = (self._clients.next_due(), self._core.next_timer())
        until = min((time for time in times if time is not None), default=None)
        if not self._machine.rest(until):
            raise Standstill(f"at {now:.1f} s: turns wait, and nothing will happen")
        after = self._machine.now()
        self._idle_rounds = self._idle_rounds + 1 if after <= now else 0
        if self._idle_rounds > IDLE_ROUNDS:
            raise Standstill(f"at {now:.1f} s: time stands still")
        self._rested = True
        if wanted:
            self._found.stalled += after - now
        else:
            self._last_step = after

    # --- a step --------------------------------------------------------------------------------

    def _step(self, now: float) -> bool:
        plan = self._core.begin_step(now)
        self._order()
        if plan is None:
            return False
        self._machine.planned()
        began = self._machine.now()
        host = began - (now if self._rested else self._idle_since)
        self._clients.planned(plan, began)
        result = self._machine.run(plan)
        after = self._idle_since = self._last_step = self._machine.now()
        self._found.iterations.append(self._record(plan, result, began, host))
        self._rested, self._idle_rounds, self._swapped = False, 0, [0, 0]
        self._core.finish_step(result, after)
        self._events(after)
        return True

    def _record(self, plan: Plan, result: StepResult, began: float, host: float) -> IterationRecord:
        served = [0.0] * len(self._tenants)
        prefill = 0
        for chunk in plan.chunks:
            tenant = self._clients.tenant_of(chunk.session)
            if tenant is None:
                continue
            count = len(chunk.tokens)
            read = 0 if count == 1 and chunk.start >= self._clients.prompt_of(chunk.session) else count
            prefill += read
            served[self._number[tenant]] += INPUT * read + OUTPUT * (chunk.sample is not None)
        pool = min(self._core.kv.pools, key=lambda pool: pool.available)
        waiting, active = self._clients.waiting, self._clients.active
        return IterationRecord(
            start_ts=began,
            iteration_ms=result.seconds * 1e3,
            predicted_ms=plan.predicted_seconds * 1e3,
            host_ms=host * 1e3,
            scheduled_tokens=plan.tokens,
            prefill_tokens=prefill,
            rows=len(plan.chunks),
            pages_used=pool.live,
            pages_cached=pool.idle,
            pages_free=pool.free,
            swapped_in=self._swapped[0],
            swapped_out=self._swapped[1],
            waiting=waiting.total(),
            limits=tuple(dict.fromkeys(limit for _, limit in plan.reasons)),
            served=tuple(served),
            backlogged=tuple(waiting[tenant] > 0 for tenant in self._tenants),
            active=tuple(active[tenant] > 0 for tenant in self._tenants),
        )
