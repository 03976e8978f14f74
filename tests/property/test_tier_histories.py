"""Random histories with tiers below the device: loads that fail, come late or are taken back, pools and
tiers of a few blocks, and policies that decide anything. Tokens are those of a cold run, nothing leaks,
nothing stays pinned, and nobody waits for ever.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.messages import Close
from agentserve.sim.mover import Faults
from agentserve.types import SessionId
from tests.engines import TierRig, WildPolicy, cold
from tests.histories import TIER_OPERATIONS, History
from tiering.types import Tier

FAULTS = st.builds(
    Faults,
    seed=st.integers(0, 1000),
    bad=st.sampled_from([0.0, 0.1, 1.0]),
    late=st.sampled_from([0.0, 0.2, 1.0]),
    slower=st.sampled_from([10.0, 1000.0]),
    cancelled=st.sampled_from([0.0, 0.2]),
)


def run(operations: list, **config: object) -> TierRig:  # type: ignore[type-arg]
    rig = TierRig(**config)  # type: ignore[arg-type]
    history = History(rig)
    for operation in operations:
        history.apply(operation)
        manager = rig.tiers.manager
        assert manager.disk_used <= manager.disk_bytes
    rig.drain()
    rig.settle()
    history.check_said()
    finish(rig)
    return rig


def finish(rig: TierRig) -> None:
    """Nothing is live, pinned or in flight, and with every session gone every book is empty."""
    assert rig.mover.pending == 0
    assert (rig.core.kv.moving, rig.tiers.manager.moving) == (0, 0)
    assert all(pool.live == 0 for pool in rig.core.kv.pools)
    for session in list(rig.core.sessions):
        rig.core.handle(Close(SessionId(session.id)), rig.now)
        rig.core.check()
    assert not rig.tiers.ledger.known
    assert not rig.core.ahead.wants
    manager = rig.tiers.manager
    for _ in range(100):  # a drop may be taken back, too
        rig.tiers.reset()
        rig.settle()
        if not manager.disk_used:
            break
    rig.core.kv.evict_all()
    rig.core.check()
    assert (manager.host_used, manager.disk_used, manager.moving) == (0, 0, 0)
    assert all(pool.free == pool.pages for pool in rig.core.kv.pools), "pages leaked"


@given(
    st.lists(TIER_OPERATIONS, min_size=5, max_size=50),
    st.integers(20, 40),
    st.integers(0, 30),
    st.integers(0, 30),
    FAULTS,
    st.sampled_from([4, 64]),
)
@settings(max_examples=100, deadline=None)
def test_histories_with_lru(
    operations: list,  # type: ignore[type-arg]
    pages: int,
    host: int,
    disk: int,
    faults: Faults,
    budget: int,
) -> None:
    run(
        operations,
        pages=(pages,),
        host=host,
        disk=disk,
        faults=faults,
        max_batched_tokens=budget,
        max_num_seqs=4,
    )


@given(
    st.lists(TIER_OPERATIONS, min_size=5, max_size=50),
    st.integers(20, 40),
    st.integers(1, 30),
    st.integers(0, 30),
    FAULTS,
    st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_histories_with_a_wild_policy(
    operations: list,  # type: ignore[type-arg]
    pages: int,
    host: int,
    disk: int,
    faults: Faults,
    seed: int,
) -> None:
    policy = WildPolicy(seed)
    run(operations, pages=(pages,), host=host, disk=disk, faults=faults, policy=policy, max_num_seqs=4)


@given(st.lists(TIER_OPERATIONS, min_size=5, max_size=30), st.integers(20, 40), FAULTS)
@settings(max_examples=40, deadline=None)
def test_histories_with_two_kv_groups(operations: list, pages: int, faults: Faults) -> None:  # type: ignore[type-arg]
    run(operations, pages=(pages, pages + 7), host=20, disk=20, faults=faults, max_num_seqs=3)


@given(
    st.lists(TIER_OPERATIONS, min_size=5, max_size=40),
    st.integers(20, 40),
    st.integers(1, 6),
    st.integers(0, 60),
    FAULTS,
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_histories_with_a_staging_area(
    operations: list,  # type: ignore[type-arg]
    pages: int,
    slots: int,
    disk: int,
    faults: Faults,
    seed: int,
) -> None:
    policy = WildPolicy(seed)
    run(operations, pages=(pages,), host=slots, disk=disk, faults=faults, policy=policy, staging=True)


def test_histories_do_reach_every_tier() -> None:
    """The properties above are about something: blocks come back from host and disk."""
    rig = TierRig((24,), host=12, disk=60)
    said: dict[int, list[int]] = {}
    for number in range(6):
        rig.submit(f"s{number}", [number] * 30, max_tokens=2)
        rig.drain()
        rig.settle()
        said[number] = rig.output(f"s{number}")
    for number in range(6):
        prompt = [number] * 30 + said[number] + [7]
        rig.submit(f"s{number}", prompt, max_tokens=2)
        rig.drain()
        assert rig.output(f"s{number}", 2) == cold(prompt, 2)
    hits = rig.tiers.view().hit_tokens
    assert hits[Tier.HOST.value] > 0
    assert hits[Tier.DISK.value] > 0
    rig.settle()
    finish(rig)
