"""Prefill ahead with tiers below: whose pages it takes, and what is worth bringing rather than computing."""

from __future__ import annotations

import math
from array import array

from agentserve.core.pages import DEVALUED
from agentserve.messages import AheadCounts, Park, ResetPrefixCache
from agentserve.sim.mover import Faults
from agentserve.types import SessionId
from tests.ahead_rig import MORE, quiet, tell
from tests.engines import TierRig, cold
from tiering.policy.base import Choice, Decision, Market, Residency
from tiering.policy.lru import LruPolicy
from tiering.types import Move, Tier


class Told(LruPolicy):
    """Wants each session where a test says; on the device unless said."""

    eager = False

    def __init__(self, **choices: Choice) -> None:
        super().__init__()
        self.choices = choices

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        return Decision(self.choices.get(session, Choice.HOLD), math.inf, "told")


def waiting(rig: TierRig, name: str, prompt: list[int]) -> list[int]:
    turn = rig.submit(name, prompt, max_tokens=2)
    rig.drain()
    rig.core.handle(Park(SessionId(name), turn, waiting_tool=True), rig.now)
    rig.settle()
    return prompt + rig.output(name, turn)


def cached(rig: TierRig, tokens: list[int]) -> int:
    return rig.core.kv.cached_tokens(rig.core.namespaces.of(""), array("i", tokens))


def take(rig: TierRig, name: str, prompt: list[int]) -> int:
    """The next turn; returns the prompt tokens that it computed."""
    rig.submit(name, prompt, max_tokens=3)
    rig.drain()
    rig.settle()
    assert rig.output(name, 2) == cold(prompt, 3)
    usage = rig.ended(name, 2).usage
    return usage.prompt - usage.cached


def test_blocks_computed_ahead_may_go_without_loss_until_the_turn_has_them() -> None:
    rig = TierRig((32,), host=32)
    context = waiting(rig, "a", list(range(9)))
    room = rig.tiers.room_without_loss
    prompt = context + MORE[:22]
    tell(rig, "a", prompt)
    quiet(rig)
    assert cached(rig, prompt) == len(prompt) == 33
    pool = rig.core.kv.pools[0]
    assert rig.tiers.room_without_loss == room, "all but a tail, which there was before"
    ahead = rig.core.kv.matched(rig.core.namespaces.of(""), array("i", prompt), 33)[0]
    assert [pool.marks(page) == DEVALUED for page in ahead] == [False, False] + [True] * 6
    rig.submit("a", [*prompt, 7], max_tokens=3)
    assert not any(pool.marks(page) & DEVALUED for page in ahead), "from now on somebody wants them"
    rig.drain()
    assert rig.ended("a", 2).usage.cached == 33


def test_it_never_takes_pages_of_worth() -> None:
    """A pool full of KV that is nowhere else: nothing is computed ahead, and nothing is lost."""
    rig = TierRig((20,), host=0, policy=Told())
    context = waiting(rig, "a", list(range(10)))
    others = {name: waiting(rig, name, [ord(name)] * 22) for name in "bc"}
    free = rig.core.kv.pools[0].free
    assert free < 6
    tell(rig, "a", context + MORE)
    quiet(rig)
    computed = rig.core.view().ahead.computed
    assert 0 < computed <= (free + 1) * 4, "what is free, and the rest of its own last page"
    assert rig.core.kv.evicted == 0
    for name, other in others.items():
        assert cached(rig, other) == len(other) - 1, f"{name} has all that it computed"
    assert take(rig, "a", [*context, *MORE, 7]) == 42 - computed, "and that was of use"


def test_it_takes_pages_that_have_copies() -> None:
    rig = TierRig((20,), host=64, policy=Told(b=Choice.HOST, c=Choice.HOST))
    context = waiting(rig, "a", list(range(10)))
    others = {name: waiting(rig, name, [ord(name)] * 22) for name in "bc"}
    tell(rig, "a", context + MORE)
    quiet(rig)
    assert cached(rig, context + MORE) == len(context) + len(MORE)
    assert cached(rig, context) == len(context), "its own are not among them"
    assert rig.core.kv.evicted > 0
    assert take(rig, "a", [*context, *MORE, 7]) == 1
    for name, other in others.items():
        assert take(rig, name, [*other, 7]) <= 6, "the copies are there"


def test_what_others_need_is_taken_from_what_was_computed_ahead_first() -> None:
    rig = TierRig((20,), host=0, policy=Told())
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    quiet(rig)
    assert cached(rig, context + MORE) == len(context) + len(MORE)
    waiting(rig, "b", [8] * 60)
    assert 12 <= cached(rig, context + MORE) < 20, "its own blocks go last"
    assert rig.core.view().ahead == AheadCounts(len(context) + len(MORE) - 11, 0)


def test_kv_below_is_brought_and_not_computed_again() -> None:
    policy = Told(a=Choice.HOST)
    rig = TierRig((32,), host=32, policy=policy, faults=Faults(late=1.0, slower=50.0))
    context = waiting(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    tell(rig, "a", context + MORE[:9])
    quiet(rig)
    assert rig.core.view().ahead.computed == 0, "to bring it is for the policy to say"
    policy.choices["a"] = Choice.RESTORE
    tell(rig, "a", context + MORE[:9])
    assert rig.step() is None, "the load is under way"
    rig.settle()
    quiet(rig)
    assert rig.core.view().ahead.computed == len(context) + 9 - 20
    assert take(rig, "a", [*context, *MORE[:9], 7]) == 1
    assert sum(len(order.blocks) for order in rig.orders if order.move is Move.LOAD) == 5


def test_who_waits_for_kv_from_below_stands_aside_for_those_who_can_go_on() -> None:
    policy = Told(**dict.fromkeys("bcdefghi", Choice.HOST))
    rig = TierRig((128,), host=128, policy=policy, max_batched_tokens=16)
    contexts = {name: waiting(rig, name, [ord(name)] * 10) for name in "bcdefghi"}
    rig.core.kv.evict_all()
    contexts["a"] = waiting(rig, "a", list(range(10)))
    rig.submit("z", [5], max_tokens=30)
    for name, context in contexts.items():
        tell(rig, name, context + MORE)
    steps = [rig.step() for _ in range(15)]
    went = [any(chunk.session == "a" for chunk in plan.chunks) for plan in steps if plan is not None]
    # Four are looked at in a step; then those below are no more in turn. Its first chunk ends on a page edge.
    assert went == [False, False] + [True] * 11 + [False, False]
    assert not rig.core.ahead.wants
    rig.drain()
    policy.choices["c"] = Choice.RESTORE
    tell(rig, "c", contexts["c"] + MORE[:9])
    rig.settle()
    quiet(rig)  # the first step looks at all of them: nothing else runs
    assert cached(rig, contexts["c"] + MORE[:9]) == len(contexts["c"]) + 9
    rig.core.handle(ResetPrefixCache(1), rig.now)
    quiet(rig)
    assert cached(rig, contexts["d"] + MORE) == len(contexts["d"] + MORE), "what is below no more is computed"
    assert take(rig, "e", [*contexts["e"], *MORE, 7]) == 1


def test_kv_that_is_nowhere_is_computed_again() -> None:
    policy = Told(a=Choice.HOST)
    rig = TierRig((32,), host=32, policy=policy, faults=Faults(seed=1, bad=1.0))
    context = waiting(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    policy.choices["a"] = Choice.RESTORE
    tell(rig, "a", context + MORE[:9])
    rig.settle()
    quiet(rig)
    assert take(rig, "a", [*context, *MORE[:9], 7]) == 1
    assert rig.tiers.view().hit_tokens[Tier.HOST.value] == 0


def test_what_is_computed_ahead_is_not_copied_before_a_turn_has_it() -> None:
    rig = TierRig((32,), host=32)
    context = waiting(rig, "a", list(range(9)))
    assert rig.tiers.view().host == 2
    tell(rig, "a", context + MORE[:22])
    quiet(rig)
    rig.settle(5.0)
    assert rig.tiers.view().host == 2
    assert take(rig, "a", [*context, *MORE[:22], 7]) == 1
    assert rig.tiers.view().host == 9
