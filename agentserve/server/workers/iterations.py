"""What each step of a worker did, for the recording; and how many steps each limit kept a turn waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from agentserve.core.engine import CoreEvent
from agentserve.core.plan import Plan
from agentserve.core.timing.tally import Attention, load_of, shared
from agentserve.messages import Description, TurnEnded, TurnUsage, Withdrawn, WorkerView
from agentserve.records.lines import IterationRecord, Swapped
from agentserve.records.writer import LineWriter
from agentserve.types import SessionId
from tiering.types import Move

NO_LIMIT = frozenset({"preempted", "a preemption in this step", "prefix"})
"""Of a plan's reasons those that say what a turn waits for, and not what the step lacks."""

CLOSE_SECONDS = 1.5  # the API process waits longer for its workers

Features = Callable[[Plan], Mapping[str, float]]


class IterationLog:
    """One worker's iterations. The worker's loop is its only user; nothing here waits for the disk."""

    def __init__(self, writer: LineWriter, features: Features | None = None) -> None:
        """features: what a step's time is predicted from."""
        self._writer = writer
        self._features = features
        self._made: list[IterationRecord] = []  # to be written with the next view of the worker
        self._moved = Swapped()
        self._held: dict[SessionId, Counter[str]] = {}

    def planned(self, plan: Plan) -> None:
        """A plan is about to run: whom each limit keeps waiting. A turn may leave while it does."""
        ran = {chunk.session for chunk in plan.chunks}
        for session, reason in plan.reasons:
            if session not in ran:
                self._held.setdefault(session, Counter())[reason] += 1

    def ran(self, plan: Plan, seconds: float | None, began: float, now: float) -> None:
        """A plan was run and its results are booked. seconds: of the executor; None: it raised."""
        limits = Counter(reason for _, reason in plan.reasons)
        whole = (now - began) * 1e3
        decodes = sum(len(chunk.tokens) == 1 for chunk in plan.chunks)
        self._made.append(
            IterationRecord(
                step=plan.step,
                begin_ts=round(began, 6),
                scheduled_tokens=plan.tokens,
                decodes=decodes,
                chunks=len(plan.chunks) - decodes,
                iteration_ms=round(whole, 3),
                model_ms=round(whole if seconds is None else seconds * 1e3, 3),
                predicted_ms=round(plan.predicted_seconds * 1e3, 3),
                bound_ms=round(plan.bound_seconds * 1e3, 3),
                kv_pages=(),
                swapped_bytes=Swapped(),
                binding_limit=next((reason for reason in limits if reason not in NO_LIMIT), ""),
                limits=limits,
                preempted=limits["preempted"],
                running=0,
                waiting=0,
                failed=seconds is None,
                features=None if self._features is None else dict(self._features(plan)),
            )
        )

    def reported(self, events: Sequence[CoreEvent], view: WorkerView) -> tuple[list[CoreEvent], WorkerView]:
        """The worker is about to tell of itself: what it tells besides. What has run is written down."""
        moved, before = _moved(view), self._moved
        self._moved = moved
        swapped = Swapped(moved.into - before.into, moved.out_of - before.out_of)
        for record in self._made:
            self._writer.add(
                msgspec.structs.replace(
                    record,
                    kv_pages=view.groups,
                    swapped_bytes=swapped,
                    running=view.running,
                    waiting=view.waiting,
                )
            )
            swapped = Swapped()
        self._made.clear()
        return [self._explained(event) for event in events], self._seen(view)

    def close(self) -> None:
        self._writer.close(CLOSE_SECONDS)

    def _explained(self, event: CoreEvent) -> CoreEvent:
        if isinstance(event, TurnEnded):
            return msgspec.structs.replace(event, usage=self._left(event.session, event.usage))
        if isinstance(event, Withdrawn) and event.usage is not None:
            return msgspec.structs.replace(event, usage=self._left(event.session, event.usage))
        if isinstance(event, Description):
            return msgspec.structs.replace(event, worker=self._seen(event.worker))
        return event

    def _left(self, session: SessionId, usage: TurnUsage) -> TurnUsage:
        """What its turn took, now that it is over here."""
        held = self._held.pop(session, None)
        return usage if held is None else msgspec.structs.replace(usage, held=dict(held))

    def _seen(self, view: WorkerView) -> WorkerView:
        lost = self._writer.lost
        return msgspec.structs.replace(view, unrecorded=lost) if lost else view


def step_features(attention: Attention) -> Features:
    """What the cost model's prediction of a plan is made from, those that are not 0 (`StepLoad`)."""

    def features(plan: Plan) -> dict[str, float]:
        load = plan.load or load_of(plan.chunks, plan.copies, attention)
        if (
            load.read == load.context
        ):  # nobody has looked at what is shared: the model in use takes no interest
            load = msgspec.structs.replace(load, read=load.context - shared(plan.chunks, attention))
        found: dict[str, float] = msgspec.to_builtins(load)
        return found

    return features


def _moved(view: WorkerView) -> Swapped:
    """Since the worker began."""
    tiers = view.tiers
    if tiers is None:
        return Swapped()

    def moved(*moves: Move) -> int:
        return sum(tiers.moved.get(move.value, (0, 0.0))[0] for move in moves) * tiers.block_bytes

    return Swapped(moved(Move.LOAD, Move.FETCH, Move.BORROW), moved(Move.SAVE))
