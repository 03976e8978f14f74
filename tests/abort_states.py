"""Every state in which a session can be when it is aborted, and how it gets there.

Each function brings session `NAME` with the prompt `tokens` into its state, in the engine of a
`RealRig`, asserts that it is there, and returns what is left to do once it has been aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentserve.core.states import Phase
from agentserve.messages import Fork, Park, ToolSignal
from agentserve.types import SessionId
from tests.abort_rig import BUDGET, HOST_SLOTS, PAGE, PROMPT, VOCAB, RealRig
from tiering.policy.base import Choice, Signal
from tiering.stores.faults import DISK_COMMIT, DISK_READ, HOST_COPY
from tiering.types import Move, Tier

NAME = "s"
BLOCKS = PROMPT // PAGE
COUNT = 2  # tokens of a turn

Rest = Callable[[], None]
State = Callable[[RealRig, Sequence[int]], Rest]


def nothing() -> None: ...


# --- a turn that has not begun, or runs ----------------------------------------------------------


def queued(rig: RealRig, tokens: Sequence[int]) -> Rest:
    for number in range(rig.config.max_num_seqs):
        rig.submit(f"other{number}", [number + 3] * 20, max_tokens=60)
    rig.steps(rig.config.max_num_seqs)
    rig.submit(NAME, tokens, max_tokens=COUNT)
    rig.steps(2)
    assert rig.phase(NAME) is Phase.WAITING
    return rig.drain


def prefilling(steps: int) -> State:
    def reach(rig: RealRig, tokens: Sequence[int]) -> Rest:
        rig.submit(NAME, tokens, max_tokens=COUNT)
        rig.steps(steps)
        session = rig.core.sessions.get(SessionId(NAME))
        assert session is not None
        assert (session.phase, session.computed) == (Phase.RUNNING, BUDGET * steps)
        return nothing

    return reach


def decoding(rig: RealRig, tokens: Sequence[int]) -> Rest:
    rig.submit(NAME, tokens, max_tokens=40)
    rig.steps(6)
    assert rig.phase(NAME) is Phase.RUNNING
    assert len(rig.output(NAME)) > 1
    return nothing


def preempted(rig: RealRig, tokens: Sequence[int]) -> Rest:
    """Others that came first grow until there is no page left for it."""
    pages = rig.core.kv.pools[0].pages
    long = (pages - BLOCKS) * PAGE // 2
    for name in ("first", "second"):
        rig.submit(name, [ord(name[0]) % VOCAB] * (long - PAGE - 10), max_tokens=2 * PAGE)
    rig.submit(NAME, tokens, max_tokens=4 * PAGE)
    for _ in range(200):
        rig.step()
        if rig.phase(NAME) is Phase.PREEMPTED:
            return rig.drain
    raise AssertionError("it was not preempted")


def in_a_step(steps: int) -> State:
    def reach(rig: RealRig, tokens: Sequence[int]) -> Rest:
        rig.submit(NAME, tokens, max_tokens=40)
        rig.steps(steps)
        plan = rig.begin()
        assert plan is not None
        assert [chunk.session for chunk in plan.chunks] == [NAME]
        return lambda: rig.finish(plan)

    return reach


def in_a_step_that_copies_a_page(rig: RealRig, tokens: Sequence[int]) -> Rest:
    """It goes on from a page that its parent is writing to, so the step begins with copies."""
    rig.submit("parent", tokens, max_tokens=12)
    rig.steps(6)
    parent = rig.core.sessions.get(SessionId("parent"))
    assert parent is not None
    context = list(parent.tokens)
    rig.core.handle(Fork(parent.id, SessionId(NAME), len(context)), rig.now)
    rig.submit(NAME, [*context, 7], max_tokens=40)
    plan = rig.begin()
    assert plan is not None
    assert plan.copies
    assert NAME in [chunk.session for chunk in plan.chunks]

    def rest() -> None:
        rig.finish(plan)
        rig.drain()

    return rest


# --- at rest -------------------------------------------------------------------------------------


def rested(rig: RealRig, tokens: Sequence[int], choice: Choice, *, waits: bool = True) -> None:
    """A turn has ended, and the policy has chosen."""
    rig.policy.choice = choice
    number = rig.submit(NAME, tokens, max_tokens=COUNT)
    rig.drain()
    rig.core.handle(Park(SessionId(NAME), number, waits, ("tool",) if waits else ()), rig.now)
    assert rig.phase(NAME) is (Phase.WAITING_TOOL if waits else Phase.IDLE)
    rig.move()


def where(rig: RealRig) -> list[Tier]:
    """The tiers below that have its blocks."""
    known = rig.tiers.ledger.known[SessionId(NAME)]
    found: list[Tier] = rig.tiers.manager.run(known.keys[:BLOCKS])
    return found


def flying(rig: RealRig) -> set[Move]:
    return {transfer.move for transfer in rig.tiers.manager.flights}


def held(rig: RealRig, tokens: Sequence[int]) -> Rest:
    rested(rig, tokens, Choice.HOLD)
    assert where(rig) == []
    return nothing


def idle(rig: RealRig, tokens: Sequence[int]) -> Rest:
    rested(rig, tokens, Choice.HOLD, waits=False)
    return nothing


def dropped(rig: RealRig, tokens: Sequence[int]) -> Rest:
    rested(rig, tokens, Choice.DROP)
    return nothing


def between_end_and_park(rig: RealRig, tokens: Sequence[int]) -> Rest:
    """Early copies are under way, and nobody has said what the turn's end means."""
    rig.policy.eager = True
    rig.gate.hold(HOST_COPY)
    rig.submit(NAME, tokens, max_tokens=COUNT)
    rig.drain()
    rig.gate.await_arrival(HOST_COPY)
    assert rig.phase(NAME) is Phase.IDLE
    assert flying(rig) == {Move.SAVE}
    return nothing


def being_saved(rig: RealRig, tokens: Sequence[int]) -> Rest:
    rig.gate.hold(HOST_COPY)
    rested(rig, tokens, Choice.HOST)
    rig.gate.await_arrival(HOST_COPY)
    rig.gate.let_pass(HOST_COPY, 2)
    rig.gate.await_arrival(HOST_COPY)
    assert flying(rig) == {Move.SAVE}
    assert rig.core.kv.moving == BLOCKS
    return nothing


def in_host(rig: RealRig, tokens: Sequence[int]) -> Rest:
    """But for its beginning, which is on the device still."""
    rested(rig, tokens, Choice.HOST)
    rig.settle()
    session = rig.core.sessions.get(SessionId(NAME))
    assert session is not None
    while rig.core.kv.cached_tokens(session.namespace, session.tokens) > 2 * PAGE:
        assert rig.core.kv._evict(1)
    assert where(rig) == [Tier.HOST] * BLOCKS
    return nothing


def being_written(rig: RealRig, tokens: Sequence[int]) -> Rest:
    rig.gate.hold(DISK_COMMIT)
    rested(rig, tokens, Choice.DISK)
    while flying(rig) != {Move.WRITE}:
        rig.await_transfer()
    rig.gate.await_arrival(DISK_COMMIT)
    return nothing


def on_disk(rig: RealRig, tokens: Sequence[int]) -> Rest:
    """And nowhere else: another session has taken its host slots."""
    rested(rig, tokens, Choice.DISK)
    rig.settle()
    rig.policy.cheap = {NAME}
    rig.policy.choice = Choice.HOST
    rig.turn("filler", [3 + number % 90 for number in range(HOST_SLOTS * PAGE)])
    rig.settle()
    rig.core.kv.evict_all()
    assert where(rig) == [Tier.DISK] * BLOCKS
    return nothing


def prefetched(reach: State, point: str, move: Move) -> State:
    def reach_further(rig: RealRig, tokens: Sequence[int]) -> Rest:
        reach(rig, tokens)
        rig.gate.hold(point)
        rig.policy.choice = Choice.RESTORE
        session = rig.core.sessions.get(SessionId(NAME))
        assert session is not None
        rig.core.handle(ToolSignal(session.id, session.last_turn, Signal.CONNECTED), rig.now)
        rig.move()
        rig.gate.await_arrival(point)
        assert flying(rig) == {move}
        return nothing

    return reach_further


def loading(reach: State, point: str, move: Move) -> State:
    """Its next turn waits for its KV."""

    def reach_further(rig: RealRig, tokens: Sequence[int]) -> Rest:
        reach(rig, tokens)
        rig.gate.hold(point)
        rig.submit(NAME, [*tokens, *rig.output(NAME), 7], max_tokens=COUNT)
        assert rig.step() is None
        rig.gate.await_arrival(point)
        assert rig.phase(NAME) is Phase.WAITING
        assert flying(rig) == {move}
        return nothing

    return reach_further


def overdue(rig: RealRig, tokens: Sequence[int]) -> Rest:
    """Its next turn has stopped waiting for its KV, and computes."""
    loading(on_disk, DISK_READ, Move.FETCH)(rig, tokens)
    rig.now += 10.0
    rig.steps(1)
    assert rig.phase(NAME) is Phase.RUNNING
    assert flying(rig) == {Move.FETCH}
    return nothing


RUNNING: dict[str, State] = {
    "queued": queued,
    "prefill, first chunk done": prefilling(1),
    "prefill, second chunk done": prefilling(2),
    "decoding": decoding,
    "preempted": preempted,
    "in its first step": in_a_step(0),
    "in a step of its prefill": in_a_step(1),
    "in a step of its decode": in_a_step(5),
    "in a step that copies a page": in_a_step_that_copies_a_page,
    "loading from host": loading(in_host, HOST_COPY, Move.LOAD),
    "loading from disk": loading(on_disk, DISK_READ, Move.FETCH),
    "waited too long for the disk": overdue,
}
RESTING: dict[str, State] = {
    "idle": idle,
    "between a turn's end and its park": between_end_and_park,
    "waiting for a tool, held": held,
    "waiting for a tool, dropped": dropped,
    "waiting for a tool, being saved": being_saved,
    "waiting for a tool, in host": in_host,
    "waiting for a tool, being written": being_written,
    "waiting for a tool, on disk": on_disk,
    "waiting for a tool, being brought from host": prefetched(in_host, HOST_COPY, Move.LOAD),
    "waiting for a tool, being brought from disk": prefetched(on_disk, DISK_READ, Move.FETCH),
}
STATES = RUNNING | RESTING
