"""Waiting turns in line: what lies below is brought for as many as there is room for, in their order."""

from __future__ import annotations

from agentserve.core.restore import Begun
from agentserve.messages import Abort
from agentserve.types import SessionId, TurnId
from tests.engines import PRICES, TierRig, cold
from tiering.types import Move

CONTEXT = 39  # tokens: nine full pages of four


def rested(rig: TierRig, *names: str) -> dict[str, list[int]]:
    """Sessions at rest whose KV is below the device only; their next prompts."""
    prompts = {}
    for number, name in enumerate(names):
        tokens = list(range(1000 * number, 1000 * number + CONTEXT))
        turn = rig.submit(name, tokens, max_tokens=1)
        rig.drain()
        rig.settle()
        prompts[name] = [*tokens, *rig.output(name, turn), 7]
    rig.core.kv.evict_all()
    rig.orders.clear()
    return prompts


def loaded(rig: TierRig) -> int:
    return sum(len(order.blocks) for order in rig.orders if order.move is Move.LOAD)


def test_blocks_are_brought_for_use_however_many_turns_wait() -> None:
    names = [f"s{number}" for number in range(30)]
    rig = TierRig((48,), host=400, pace=0.001)  # room for four of thirty
    prompts = rested(rig, *names)
    turns = {name: rig.submit(name, prompt, max_tokens=4) for name, prompt in prompts.items()}
    rig.drain()
    for name, prompt in prompts.items():
        assert rig.output(name, turns[name]) == cold(prompt, 4)
        assert rig.ended(name, turns[name]).usage.cached >= CONTEXT // 4 * 4, "KV from below was not used"
    assert loaded(rig) <= 1.25 * (CONTEXT // 4) * len(names)  # turns that grow take a page from who waits


def test_no_more_is_ordered_than_there_is_room_for() -> None:
    rig = TierRig((24,), host=100)
    prompts = rested(rig, *"abcd")
    for name in "abcd":
        rig.submit(name, prompts[name], max_tokens=20)
    while not rig.core.scheduler.running:
        rig.step()
        rig.move()
        held = rig.core.kv.pools[0].live + rig.core.kv.pools[0].idle
        assert held <= 24
    assert loaded(rig) <= 2 * (CONTEXT // 4)
    rig.drain()


def test_whom_a_running_turn_robs_is_the_last_in_line() -> None:
    rig = TierRig((24,), host=100, pace=0.01)
    prompts = rested(rig, "a", "b")
    for name in "ab":
        rig.submit(name, prompts[name], max_tokens=1)
        rig.now += 0.01
    rig.move()
    while rig.mover.pending:
        rig.wait()
        rig.move()
    kv = rig.core.kv
    taken = kv.take_pinned(12)  # as growing turns do: there are four free pages
    assert taken is not None
    cached = {name: kv.cached_tokens(known.namespace, known.tokens) for name in "ab"
              if (known := rig.tiers.ledger.known[SessionId(name)])}  # fmt: skip
    assert cached["a"] >= CONTEXT // 4 * 4
    assert cached["b"] < cached["a"]
    for block in taken:
        kv.unpin(block)
    rig.drain()


def test_a_session_without_tokens_has_nothing_to_bring() -> None:
    rig = TierRig((24,), host=100)
    rested(rig, "a")
    turn = rig.submit("b", range(5000, 5010), max_tokens=4)
    rig.core.handle(Abort(SessionId("b"), TurnId(turn)), rig.now)
    rig.settle()
    known = rig.tiers.ledger.known[SessionId("b")]
    assert not known.tokens
    assert rig.tiers.restores.begin(known, PRICES, rig.now, 10, waits=False) is Begun.NOTHING
