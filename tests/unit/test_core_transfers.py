"""What becomes of transfers after they were ordered: hurried, taken back; and whose answer touches what."""

from __future__ import annotations

from random import Random

import msgspec

from agentserve.core.spill import SAVE_SHARE
from agentserve.messages import Abort, Close, Devalue
from agentserve.sim.mover import Faults
from agentserve.types import SessionId, TurnId
from tests.engines import PRICES, TierRig, WildPolicy, cold
from tests.histories import History
from tests.tier_turns import SLOW, Scripted, orders, residency, signal, turn
from tiering.policy.base import Choice, Decision, Departure, Market, Residency
from tiering.types import Change, Move, Word


def spilled(rig: TierRig, names: str) -> dict[str, list[int]]:
    """Sessions with five blocks each in the host, and none on the device."""
    contexts = {name: turn(rig, name, [ord(name)] * 2 + list(range(20))) for name in names}
    rig.core.kv.evict_all()
    rig.orders.clear()
    return contexts


def prefetch(rig: TierRig, policy: Scripted, name: str) -> None:
    policy.choices[name] = Choice.RESTORE
    signal(rig, name)
    rig._hand_over()


def words(rig: TierRig) -> list[tuple[int, Word]]:
    return [(change.id, change.word) for change in rig.changes]


# --- hurried ---------------------------------------------------------------------------------


def test_what_has_come_to_rest_is_saved_though_much_is_being_loaded() -> None:
    """Its pages go to whoever enters next; a load that pins as many does not keep them from being saved."""
    rig = TierRig((32,), host=64)
    context = turn(rig, "a", list(range(38)))
    rig.core.kv.evict_all()
    rig.mover._faults = SLOW
    rig.submit("a", [*context, 7], max_tokens=1)
    rig.step()
    assert rig.core.kv.moving == 9 > 32 // SAVE_SHARE
    before = orders(rig, Move.SAVE)
    rig.submit("b", list(range(100, 122)), max_tokens=1)
    while not rig.output("b"):
        assert rig.step() is not None
    assert orders(rig, Move.SAVE) == before + 5


def test_a_prefetch_that_a_turn_joins_goes_before_the_others() -> None:
    policy = Scripted(dict.fromkeys("abc", Choice.HOST))
    rig = TierRig((64,), host=32, policy=policy)
    contexts = spilled(rig, "abc")
    for name in "bca":
        prefetch(rig, policy, name)
    of_b, of_c, of_a = (order.id for order in rig.orders)
    rig.submit("a", [*contexts["a"], 7], max_tokens=1)
    rig._hand_over()
    assert rig.changes == [Change(of_a, Word.HURRY)]
    rig.now += 2 * PRICES.seconds(PRICES.load, 5)
    assert [done.id for done in rig.mover.poll(rig.now)] == [of_b, of_a]
    assert of_c


def test_a_prefetch_that_takes_too_long_is_taken_back_and_ordered_anew() -> None:
    policy = Scripted(dict.fromkeys("ab", Choice.HOST))
    rig = TierRig((64,), host=32, policy=policy)
    contexts = spilled(rig, "ab")
    rig.mover._faults = SLOW
    prefetch(rig, policy, "b")
    rig.mover._faults = Faults()
    prefetch(rig, policy, "a")
    rig.now += 1.0
    rig.move()
    assert words(rig) == []
    number = rig.orders[-1].id
    rig.submit("a", [*contexts["a"], 7], max_tokens=1)
    rig._hand_over()
    assert words(rig) == [(number, Word.CANCEL)]
    assert rig.orders[-1].urgent
    rig.now += 0.25
    rig.drain()
    assert rig.output("a", 2) == cold([*contexts["a"], 7], 1)


# --- taken back --------------------------------------------------------------------------------


def waiting_load(rig: TierRig, policy: Scripted) -> tuple[list[int], int]:
    """A turn of `a` that waits for its load, which waits for that of `b`: a's context, and the load's id."""
    contexts = spilled(rig, "ab")
    rig.mover._faults = SLOW
    prefetch(rig, policy, "b")
    rig.mover._faults = Faults()
    rig.submit("a", [*contexts["a"], 7], max_tokens=2)
    rig.move()
    assert rig.core.kv.moving == 10
    return contexts["a"], rig.orders[-1].id


def test_a_load_is_taken_back_when_its_turn_is_aborted_or_closed() -> None:
    for end in (Abort(SessionId("a"), TurnId(2)), Close(SessionId("a"))):
        policy = Scripted(dict.fromkeys("ab", Choice.HOST))
        rig = TierRig((64,), host=32, policy=policy)
        _, load = waiting_load(rig, policy)
        rig.core.handle(end, rig.now)
        rig.core.check()
        assert rig.core.kv.moving == 10, "pinned until it is answered"
        rig.move()
        rig.move()
        assert words(rig) == [(load, Word.CANCEL)]
        assert rig.core.kv.moving == 5, "only the other's"
        rig.settle()
        assert rig.core.kv.moving == 0


def test_a_load_is_taken_back_when_nobody_waits_for_it_any_longer() -> None:
    policy = Scripted(dict.fromkeys("ab", Choice.HOST))
    rig = TierRig((64,), host=32, policy=policy)
    context, load = waiting_load(rig, policy)
    rig.now += 0.3
    rig.move()
    rig.move()
    assert words(rig) == [(load, Word.CANCEL)]
    assert rig.core.kv.moving == 5
    rig.drain()
    assert rig.output("a", 2) == cold([*context, 7], 2)
    assert rig.ended("a", 2).usage.cached == 0


def test_a_prefetch_for_a_session_that_was_given_up_is_taken_back() -> None:
    policy = Scripted(dict.fromkeys("ab", Choice.HOST))
    rig = TierRig((64,), host=32, policy=policy)
    spilled(rig, "ab")
    prefetch(rig, policy, "b")
    prefetch(rig, policy, "a")
    policy.choices["a"] = Choice.DROP
    rig.core.handle(Devalue(SessionId("a"), Departure.SUPERSEDED), rig.now)
    rig.move()
    rig.move()
    assert words(rig) == [(rig.orders[1].id, Word.CANCEL)]
    rig.settle()
    assert (residency(rig, "a").device, residency(rig, "b").device) == (0, 5)


def test_copies_in_the_making_are_taken_back_unless_somebody_else_values_the_blocks() -> None:
    policy = Scripted(dict.fromkeys("abc", Choice.HOST))
    rig = TierRig((64,), host=64, policy=policy)
    rig.mover._faults = SLOW
    prompts = {"a": list(range(22)), "b": list(range(100, 122)), "c": [*range(100, 116), *range(6)]}
    for name, tokens in prompts.items():
        rig.submit(name, tokens, max_tokens=1)
        rig.drain()
    rig.now += 1.0
    rig.move()
    rig.move()
    assert {order.move for order in rig.orders} == {Move.SAVE}
    for name in "ab":
        policy.choices[name] = Choice.DROP
        rig.core.handle(Devalue(SessionId(name), Departure.ABANDONED), rig.now)
    rig.move()
    assert words(rig) == [(rig.orders[0].id, Word.CANCEL)], "what b and c share is still wanted"


def test_a_copy_that_somebody_counts_on_after_it_was_taken_back_is_made_again() -> None:
    policy = Scripted(dict.fromkeys("xab", Choice.HOST))
    rig = TierRig((64,), host=64, policy=policy)
    rig.mover._faults = SLOW
    for name, first in (("x", 50), ("a", 0)):
        rig.submit(name, list(range(first, first + 22)), max_tokens=1)
        rig.drain()
    rig.now += 0.1
    rig.move()
    assert [order.move for order in rig.orders] == [Move.SAVE] * 2
    policy.choices["a"] = Choice.DROP
    rig.mover._faults = Faults()
    rig.core.handle(Devalue(SessionId("a"), Departure.ABANDONED), rig.now)
    number = rig.submit("b", list(range(22)), max_tokens=1)  # before the mover has answered
    plan = rig.core.begin_step(rig.now)
    assert plan is not None
    rig.core.finish_step(rig.executor.run(plan), rig.now)
    rig.now += 0.1
    rig.core.tick(rig.now)
    assert orders(rig, Move.SAVE) == 10, "b counts on the copies that are being taken back"
    rig.settle(0.0)
    assert rig.output("b", number)
    assert residency(rig, "b").copied == 5


# --- whose answer touches what -----------------------------------------------------------------


def test_the_answer_to_an_order_that_was_taken_back_touches_its_own_pages_only() -> None:
    """It was too late: both loads run, the old one ends last."""
    policy = Scripted(dict.fromkeys("ab", Choice.HOST))
    rig = TierRig((64,), host=32, policy=policy)
    old = turn(rig, "a", list(range(22)))
    new = [*range(8), *range(60, 74)]
    turn(rig, "b", new)
    rig.core.kv.evict_all()
    rig.orders.clear()
    prefetch(rig, policy, "a")
    rig.submit("a", [*new, 7], max_tokens=2)
    rig.core.check()
    (first, second) = rig.orders[-1], rig.core.take_transfers()[0]
    assert [change.word for change in rig.core.take_changes()] == [Word.CANCEL]
    assert not {page for block in first.blocks for page in block.pages} & {
        page for block in second.blocks for page in block.pages
    }
    rig.mover.submit(second, rig.now)
    while rig.core.has_work:
        rig.now += 0.002
        rig.core.finish_transfers(rig.mover.poll(rig.now), rig.now)
        rig.core.check()
        plan = rig.core.begin_step(rig.now)
        if plan is not None:
            rig.core.finish_step(rig.executor.run(plan), rig.now)
    rig._collect()
    assert rig.output("a", 2) == cold([*new, 7], 2)
    assert rig.ended("a", 2).usage.cached == 20
    rig.settle()
    turn(rig, "c", [*old, 7])
    assert rig.ended("c").usage.cached == 20, "what had arrived before serves others"


def test_an_answer_is_taken_once() -> None:
    policy = Scripted(dict.fromkeys("ab", Choice.HOST))
    rig = TierRig((64,), host=32, policy=policy)
    waiting_load(rig, policy)
    rig.core.handle(Close(SessionId("a")), rig.now)
    rig._hand_over()
    done = rig.mover.poll(rig.now)
    assert [end.cancelled for end in done] == [True]
    for _ in range(2):
        rig.core.finish_transfers(done, rig.now)
        rig.core.check()
        assert rig.core.kv.moving == 5


class BackAndForth(WildPolicy):
    """Copies what has no copy, and brings back what is not on the device."""

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        decision = super().decide(session, residency, market)
        if residency.device > residency.copied or decision.choice is Choice.DROP:
            return decision
        lost = residency.host + residency.disk > 0
        return msgspec.structs.replace(decision, choice=Choice.RESTORE if lost else Choice.DISK)


def test_random_histories_hurry_and_take_back() -> None:
    """What the property tests of histories rely on: both happen there, and leave
    nothing behind."""
    said: set[tuple[Move, Word]] = set()
    for seed in range(40):
        rng = Random(seed)
        faults = Faults(seed=seed, late=0.3)
        host = (12, 2)[seed % 2]
        rig = TierRig((60,), host=host, disk=99, policy=BackAndForth(seed), faults=faults, staging=host == 2)
        history = History(rig)
        for _ in range(60):
            number = rng.randrange(5)
            if rng.random() < 0.2:
                rig.core.kv.evict_all()
            history.apply(
                rng.choice(
                    [
                        ("submit", number, [number, *range(rng.randrange(8, 40))], 3, 0),
                        ("extend", number, [1, 2, 3]),
                        ("steps", 8),
                        ("abort", number),
                        ("close", number),
                        ("devalue", number, Departure.ABANDONED),
                        ("come back", number),
                        ("pause", 1.0),
                    ]
                )
            )
        rig.drain()
        rig.settle()
        history.check_said()
        assert (rig.core.kv.moving, rig.tiers.manager.moving, rig.core.kv.pools[0].live) == (0, 0, 0)
        moves = {order.id: order.move for order in rig.orders}
        said |= {(moves[change.id], change.word) for change in rig.changes}
    assert (Move.LOAD, Word.HURRY) in said
    assert {(move, Word.CANCEL) for move in (Move.SAVE, Move.LOAD, Move.WRITE, Move.FETCH)} <= said
