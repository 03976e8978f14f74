"""What other workers have on disk: who asks, who waits for the answer and how long, and that a peer's copy is
never counted on."""

from __future__ import annotations

import pytest

from agentserve.messages import Close
from agentserve.sim.mover import Faults
from agentserve.types import SessionId
from tests.engines import PRICES, TierRig, cold
from tests.tier_turns import SLOW, Scripted, orders, residency, turn
from tiering.policy.base import Choice
from tiering.types import Move, Tier, Word

PROMPT = list(range(42))


def peer_with(*prompts: list[int]) -> TierRig:
    """Another worker, that has the blocks of these on its disk."""
    policy = Scripted(dict.fromkeys(map(str, range(9)), Choice.DISK))
    rig = TierRig((64,), host=64, disk=100, policy=policy)
    for number, prompt in enumerate(prompts):
        turn(rig, str(number), prompt)
    assert rig.tiers.manager.disk_blocks
    return rig


def newcomer(peer: TierRig, **settings: object) -> TierRig:
    return TierRig((64,), host=16, disk=100, policy=Scripted(), peers=[peer], **settings)  # type: ignore[arg-type]


def test_a_session_that_is_new_here_gets_its_blocks_from_a_peer() -> None:
    rig = newcomer(peer_with(PROMPT))
    context = turn(rig, "a", [*PROMPT, 99, 98])
    assert (orders(rig, Move.PROBE), orders(rig, Move.BORROW)) == (10, 10)
    assert rig.ended("a").usage.cached == 40
    assert rig.tiers.view().hit_tokens[Tier.DISK.value] == 40
    turn(rig, "a", [*context, 7])
    assert orders(rig, Move.PROBE) == 10, "it is at home here now"


def test_blocks_that_no_peer_has_are_computed_and_nobody_is_asked_twice() -> None:
    rig = newcomer(peer_with(PROMPT))
    turn(rig, "a", [*PROMPT[:18], *range(60, 84)])
    assert rig.ended("a").usage.cached == 16, "as far as they agree"
    turn(rig, "b", list(range(70, 90)))
    assert rig.ended("b").usage.cached == 0
    turn(rig, "b", list(range(500, 520)))
    assert orders(rig, Move.PROBE) == 10 + 4


def test_without_peers_or_with_all_blocks_at_hand_nobody_is_asked() -> None:
    alone = TierRig((64,), host=16, disk=100)
    turn(alone, "a", PROMPT)
    rig = newcomer(peer_with(PROMPT))
    turn(rig, "a", PROMPT)
    asked = orders(rig, Move.PROBE)
    turn(rig, "b", PROMPT)
    turn(rig, "c", [1, 2, 3])
    assert (orders(alone, Move.PROBE), orders(rig, Move.PROBE)) == (0, asked)


def test_a_turn_waits_for_an_answer_and_a_load_no_longer_than_computing_takes() -> None:
    rig = newcomer(peer_with(PROMPT), faults=SLOW)
    began = rig.now
    rig.submit("a", PROMPT, max_tokens=2)
    whole = PRICES.recompute(0, 40)
    assert rig.core.next_timer() == pytest.approx(began + whole / 4)
    assert rig.step() is None
    rig.now = began + whole / 4 + 0.001
    while rig.core.has_work:
        assert rig.step() is not None, "it went on waiting"
    assert rig.output("a") == cold(PROMPT, 2)


def test_the_time_that_asking_took_is_not_had_again_for_the_load() -> None:
    rig = newcomer(peer_with(PROMPT))
    began = rig.now
    rig.submit("a", PROMPT, max_tokens=1)
    rig._hand_over()
    rig.now += 0.05  # of the 0.4 that computing takes
    rig.core.finish_transfers(rig.mover.poll(rig.now), rig.now)
    rig.mover._faults = SLOW
    assert rig.step() is None
    assert orders(rig, Move.BORROW) == 10
    assert rig.core.next_timer() == pytest.approx(began + PRICES.recompute(0, 40))


def test_others_pass_a_turn_that_waits_for_an_answer() -> None:
    rig = newcomer(peer_with(PROMPT), faults=SLOW)
    rig.submit("a", PROMPT, max_tokens=1)
    rig.submit("b", [5, 6, 7], max_tokens=1)
    plan = rig.step()
    assert plan is not None
    assert [chunk.session for chunk in plan.chunks] == ["b"]


def test_a_question_is_taken_back_when_its_session_goes() -> None:
    rig = newcomer(peer_with(PROMPT), faults=SLOW)
    for name in "ab":
        rig.submit(name, [ord(name), *PROMPT], max_tokens=1)
    rig.core.handle(Close(SessionId("b")), rig.now)
    rig.move()
    assert [(change.id, change.word) for change in rig.changes] == [(2, Word.CANCEL)]
    rig.drain()
    rig.settle()
    assert (rig.core.kv.moving, rig.tiers.manager.moving) == (0, 0)


def test_a_peers_copy_is_no_copy_of_ours() -> None:
    """Pages do not go as if nothing were lost, and a spill still writes to our own disk."""
    peer = peer_with(PROMPT)
    policy = Scripted({"a": Choice.HOLD})
    rig = TierRig((64,), host=16, disk=100, policy=policy, peers=[peer])
    turn(rig, "a", PROMPT)
    assert residency(rig, "a").copied == 0
    assert rig.core.kv.pools[0].spare == 0
    rig.core.kv.evict_all()
    assert residency(rig, "a").disk == 10
    assert not rig.tiers.manager.copied(rig.orders[0].blocks[0].key)


def test_what_a_peer_has_no_more_is_computed_and_forgotten() -> None:
    peer = peer_with(PROMPT)
    rig = newcomer(peer)
    rig.submit("a", PROMPT, max_tokens=1)
    rig._hand_over()
    rig.now += 0.01
    rig.core.finish_transfers(rig.mover.poll(rig.now), rig.now)
    keys = [block.key for block in rig.orders[0].blocks]
    del peer.mover._disk[keys[5]]
    rig.drain()
    rig.settle()
    assert rig.ended("a").usage.cached == 20
    manager = rig.tiers.manager
    assert manager.source(keys[5]) is None
    assert (manager.failed[Move.BORROW], Move.PROBE in manager.failed) == (1, False)
    assert (manager.health.error, manager.disk_back < 0) == ("", True), "our own disk is well"


def test_whatever_goes_wrong_with_peers_tokens_are_those_of_a_cold_run() -> None:
    peer = peer_with(PROMPT, list(range(300, 342)))
    borrowed = 0
    for seed in range(40):
        faults = Faults(seed=seed, bad=0.1, late=0.2, cancelled=0.1)
        rig = newcomer(peer, faults=faults)
        for name, tokens in (("a", PROMPT), ("b", [*range(300, 330), 7]), ("c", PROMPT[:20])):
            rig.submit(name, tokens, max_tokens=3)
            rig.step()
        rig.drain()
        rig.settle()
        for name, tokens in (("a", PROMPT), ("b", [*range(300, 330), 7]), ("c", PROMPT[:20])):
            assert rig.output(name) == cold(tokens, 3)
        assert (rig.core.kv.moving, rig.tiers.manager.moving, rig.core.kv.pools[0].live) == (0, 0, 0)
        borrowed += orders(rig, Move.BORROW)
        rig.tiers.reset()
        assert all(rig.tiers.manager.source(block.key) is not Move.BORROW for block in rig.orders[0].blocks)
    assert borrowed > 100


def test_a_question_is_bounded_and_the_answer_of_each_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentserve.core.probe.MOST_KEYS", 4)
    rig = newcomer(peer_with(PROMPT))
    turn(rig, "a", [*PROMPT, 99, 98])
    assert (orders(rig, Move.PROBE), rig.ended("a").usage.cached) == (4, 16)
    slow = newcomer(peer_with(PROMPT), faults=SLOW)
    for name in "ab":
        slow.submit(name, PROMPT, max_tokens=2)
    probes = slow.tiers.probes
    slow._hand_over()
    first, second = [order for order in slow.orders if order.move is Move.PROBE]
    probes.finished(second)
    assert (list(probes._probes), probes._numbers) == ([SessionId("a")], {first.id: SessionId("a")})
    slow.drain()
    assert probes._numbers == {}
