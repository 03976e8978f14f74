"""KV manager: copy-on-write, forks, tails, eviction order, accounting."""

from __future__ import annotations

from array import array

import pytest

from agentserve.core.kv import KVManager
from agentserve.core.pages import PagePool
from agentserve.messages import Fork
from agentserve.types import SessionId
from tests.engines import Rig, cold

A, B, C = SessionId("a"), SessionId("b"), SessionId("c")
NS = b"n" * 32


def computed(kv: KVManager, session: SessionId, tokens: list[int], length: int | None = None) -> array[int]:
    """Let a session compute its tokens, as a step would."""
    run = array("i", tokens)
    hit = kv.begin(session, NS, run)
    assert kv.reserve(session, hit, length or len(run)) is not None
    kv.plan_done()
    kv.seal(session, run, length or len(run))
    kv.check()
    return run


def test_a_parked_session_holds_nothing_and_is_found_again() -> None:
    kv = KVManager(4, (16,))
    run = computed(kv, A, list(range(10)))
    kv.park(A, run, 10)
    kv.check()
    assert (kv.pools[0].live, kv.pools[0].idle) == (0, 3)
    assert kv.cached_tokens(NS, run) == 10
    assert kv.begin(B, NS, array("i", range(12))) == 10  # token-granular: two pages and two slots
    assert kv.begin(C, b"m" * 32, run) == 0  # another namespace sees nothing


def test_a_tail_given_whole_is_adopted_without_a_copy() -> None:
    kv = KVManager(4, (16,))
    run = computed(kv, A, list(range(10)))
    kv.park(A, run, 10)
    kv.begin(A, NS, array("i", range(12)))
    assert kv.reserve(A, 10, 12) == []
    assert kv.pools[0].live == 3
    kv.check()


def test_a_tail_given_in_part_is_copied_and_pinned_until_the_plan_has_run() -> None:
    kv = KVManager(4, (16,))
    run = computed(kv, A, list(range(10)))
    kv.park(A, run, 10)
    kv.begin(B, NS, array("i", [*range(9), 77, 78]))
    copies = kv.reserve(B, 9, 11)
    assert copies is not None
    assert [(copy.slots, copy.group) for copy in copies] == [(1, 0)]
    source = copies[0].source
    assert kv.pools[0].holds(source) == 1
    kv.check()
    kv.plan_done()
    assert kv.pools[0].holds(source) == 0
    kv.check()


def test_the_longest_common_prefix_donates() -> None:
    kv = KVManager(8, (64,))
    for name, end in (("x", [1, 2, 3, 9]), ("y", [1, 2, 4]), ("z", [1, 5])):
        tokens = list(range(8)) + end
        kv.park(SessionId(name), computed(kv, SessionId(name), tokens), len(tokens))
    queries = (([1, 2, 3, 4], 3), ([1, 2, 4, 4], 3), ([1, 2, 8, 4], 2), ([1, 6, 6], 1), ([0, 1], 0))
    for query, extra in queries:
        assert kv.cached_tokens(NS, array("i", list(range(8)) + query)) == 8 + extra


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    kv = KVManager(4, (16,))
    for length in (1, 2, 4, 5, 8, 9):
        run = computed(kv, A, list(range(length)))
        kv.park(A, run, length)
        assert kv.begin(B, NS, run) == length - 1
        kv.release(B)
        kv.evict_all()


def test_twins_computed_at_once_end_in_one_page() -> None:
    kv = KVManager(4, (16,))
    run = array("i", range(8))
    for name in (A, B):
        kv.begin(name, NS, run)
        kv.reserve(name, 0, 8)
    kv.seal(A, run, 8)
    kv.seal(B, run, 8)
    kv.check()
    assert kv.table(A) == kv.table(B)
    assert kv.pools[0].live == 2


def test_eviction_takes_leaves_before_parents_and_the_oldest_first() -> None:
    kv = KVManager(4, (8,))
    shared = [0, 0, 0, 0]
    for name, end in ((A, [1] * 8), (B, [2] * 4)):
        tokens = shared + end
        kv.park(name, computed(kv, name, tokens), len(tokens))
    assert kv.cached_tokens(NS, array("i", shared + [1] * 8)) == 12  # A is now the more recent
    assert kv._evict(1)
    kv.check()
    assert kv.cached_tokens(NS, array("i", shared + [2] * 4)) == 4
    assert kv._evict(1)
    assert kv.cached_tokens(NS, array("i", shared + [1] * 8)) == 8  # tail first
    assert kv.evict_all() == 2
    assert kv.pools[0].free == 8


def test_held_pages_are_not_evicted_and_a_failed_reserve_changes_nothing() -> None:
    kv = KVManager(4, (4,))
    computed(kv, A, list(range(12)))
    kv.begin(B, NS, array("i", [9] * 8))
    assert kv.reserve(B, 0, 8) is None
    assert kv.pools[0].free == 1
    assert kv.evict_all() == 0
    kv.check()


def test_fork_of_a_running_session_shares_its_tail_and_the_appender_copies() -> None:
    rig = Rig(max_batched_tokens=64)
    prompt = list(range(6))
    rig.submit("a", prompt, max_tokens=12)
    rig.step()  # six tokens computed: one page and a tail of two slots
    rig.core.handle(Fork(SessionId("a"), SessionId("b"), 6), rig.now)
    rig.core.check()
    plan = rig.step()  # the parent appends to a page that the tree may lend: it must copy
    assert plan is not None
    assert [copy.slots for copy in plan.copies] == [2]
    rig.submit("b", prompt, max_tokens=12, seed=5)
    rig.drain()
    assert rig.ended("b", 1).usage.cached == 5
    assert rig.output("a") == cold(prompt, 12)
    assert rig.output("b") == cold(prompt, 12, seed=5)


def test_a_tail_that_its_owner_still_holds_is_not_adopted() -> None:
    rig = Rig(max_batched_tokens=64)
    prompt = list(range(7))
    rig.submit("a", prompt, max_tokens=12)
    rig.step()
    rig.core.handle(Fork(SessionId("a"), SessionId("b"), 7), rig.now)
    rig.submit("b", [*prompt, 50, 51], max_tokens=12)  # enters in the step in which the parent appends
    rig.drain()
    assert rig.output("a") == cold(prompt, 12)
    assert rig.output("b") == cold([*prompt, 50, 51], 12)


def test_page_pool_refuses_what_would_corrupt_it() -> None:
    pool = PagePool(4)
    (page,) = pool.take(1)
    with pytest.raises(RuntimeError, match="is free"):
        pool.hold(3 - page if page != 3 else 1)
    pool.cache(page)
    with pytest.raises(RuntimeError, match="cached already"):
        pool.cache(page)
    assert pool.release(page)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(page)
    pool.uncache(page)
    with pytest.raises(RuntimeError, match="not cached"):
        pool.uncache(page)
    pool.check()
    assert pool.free == 4


def test_a_block_table_is_given_once() -> None:
    kv = KVManager(4, (8,))
    kv.begin(A, NS, array("i", [1]))
    with pytest.raises(RuntimeError, match="already"):
        kv.begin(A, NS, array("i", [1]))
