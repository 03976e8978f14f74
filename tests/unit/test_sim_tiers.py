"""The simulation with tiers: nothing wedges, nothing changes a token, and a log replays."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.core.config import CoreConfig
from agentserve.core.market import TierParts, TierSetup
from agentserve.core.record import Entry, Ordered, Ticked, Transferred, decode_entries, encode_entry
from agentserve.sim.executor import WrongKV
from agentserve.sim.mover import Faults, FixedPrices, SimMover
from agentserve.sim.replay import ReplayError, named_parts, replay
from agentserve.sim.run import Outcome, Simulation
from agentserve.sim.workload import make_workload
from agentserve.types import FinishReason
from tests.crowds import COST, SMALL, crowd
from tests.engines import BLOCK_BYTES, PRICES, TierRig, WildPolicy, tier_parts
from tiering.manager import HEADER_BYTES
from tiering.policy.lru import LruPolicy
from tiering.types import Change, Move, Transfer, Word

FAULTY = Faults(seed=3, bad=0.05, late=0.05, slower=100.0, cancelled=0.05)


def oversubscribed(
    seed: int, host: float, disk: float, faults: Faults | None = None, log: list[Entry] | None = None
) -> Simulation:
    """Agents whose contexts together are ten times the pool. host, disk: sizes in pools."""
    agents, settings, pages = crowd(seed)
    policy = WildPolicy(seed) if seed % 2 else LruPolicy()
    return Simulation(
        agents,
        CoreConfig(**settings),  # type: ignore[arg-type]
        pages=pages,
        cost=COST,
        tiers=tier_parts(int(host * pages), int(disk * pages), policy),
        faults=faults,
        log=log.append if log is not None else None,
        check_every_step=seed % 20 == 0,
    )


def finished(simulation: Simulation) -> Outcome:
    outcome = simulation.run()
    core, mover = simulation.core, simulation.mover
    core.check()
    assert mover is not None
    assert mover.pending == 0
    assert core.kv.moving == 0
    assert core.kv.pools[0].live == 0
    return outcome


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_ten_times_oversubscribed_with_tiers_and_faults_always_finishes(first: int) -> None:
    """A hundred seeds, over a plain policy and a wild one: every agent finishes, and KV came back."""
    loads = 0
    for seed in range(first, first + 25):
        faults = Faults(seed=seed, bad=0.1, late=0.1, slower=300.0, cancelled=0.1) if seed % 4 else None
        simulation = oversubscribed(
            seed, host=[0.5, 2.0][seed % 2], disk=[0.0, 3.0, 20.0][seed % 3], faults=faults
        )
        outcome = finished(simulation)
        assert outcome.unfinished == (), f"seed {seed} wedged"
        assert {turn.reason for turn in outcome.turns} <= {FinishReason.STOP, FinishReason.LENGTH}
        assert simulation.core.tiers is not None
        moved = simulation.core.tiers.manager.moved
        loads += moved.get(Move.LOAD, (0, 0.0))[0] + moved.get(Move.FETCH, (0, 0.0))[0]
    assert loads > 100, "nothing ever came back from below"


def test_tiers_and_faults_change_no_token() -> None:
    def said(simulation: Simulation) -> dict[tuple[str, int], tuple[int, ...]]:
        return {(turn.agent, turn.turn): turn.output for turn in finished(simulation).turns}

    without = said(oversubscribed(8, 0, 0))
    assert said(oversubscribed(8, 2, 0)) == without
    assert said(oversubscribed(8, 0.5, 10, FAULTY)) == without


def test_tiers_save_computing() -> None:
    """What they are for: under pressure far fewer tokens are computed."""

    def computed(simulation: Simulation) -> int:
        return sum(turn.computed for turn in finished(simulation).turns)

    assert computed(oversubscribed(8, 20, 0)) < 0.7 * computed(oversubscribed(8, 0, 0))


def test_empty_tiers_give_the_plans_of_none() -> None:
    agents = make_workload(SMALL)
    config = CoreConfig(page_size=4, max_batched_tokens=32, max_num_seqs=8)
    plain = Simulation(agents, config, pages=60, cost=COST).run()
    assert Simulation(agents, config, pages=60, cost=COST, tiers=None).run().digests == plain.digests
    empty = Simulation(agents, config, pages=60, cost=COST, tiers=tier_parts(0)).run()
    assert [turn.output for turn in empty.turns] == [turn.output for turn in plain.turns]


def parts(setup: TierSetup) -> TierParts:
    policy = {"lru": LruPolicy, "wild": lambda: WildPolicy(7)}[setup.policy]()
    return TierParts(setup, policy, FixedPrices(setup.prices))


@pytest.mark.parametrize("seed", [6, 7])
def test_a_log_with_transfers_replays_into_the_same_plans_and_transfers(seed: int) -> None:
    log: list[Entry] = []
    outcome = finished(oversubscribed(seed, 0.5, 5, FAULTY, log))
    kinds = {type(entry) for entry in log}
    assert {Ordered, Transferred} <= kinds
    data = b"".join(encode_entry(entry) for entry in log)
    result = replay(decode_entries(data), parts)
    assert (result.plans, result.differs_at) == (outcome.steps, None)
    if seed == 7:
        assert Ticked in kinds


def test_a_log_with_other_answers_is_noticed() -> None:
    log: list[Entry] = []
    finished(oversubscribed(6, 0.5, 5, None, log))
    changed = [entry for entry in log if not isinstance(entry, Transferred)]
    assert replay(changed, parts).differs_at is not None


def test_the_policies_that_can_be_asked_for_are_found_by_name() -> None:
    setup = tier_parts(4).setup
    assert named_parts(setup).policy.name == "lru"
    assert named_parts(setup).book.prices() == setup.prices
    unknown = msgspec.structs.replace(setup, policy="best")
    with pytest.raises(ReplayError, match="unknown tier policy 'best'"):
        named_parts(unknown)


def test_a_log_with_tiers_needs_its_policy() -> None:
    log: list[Entry] = []
    finished(oversubscribed(6, 0.5, 0, None, log))
    with pytest.raises(ReplayError, match="no policy lru"):
        replay(log)


def test_one_seed_one_history() -> None:
    first, again = (finished(oversubscribed(5, 1, 5, FAULTY)) for _ in range(2))
    assert first == again


class AtPark(LruPolicy):
    """Copies when it is asked, not before."""

    eager = False


def saving() -> tuple[TierRig, Transfer]:
    """A session at rest, and the order to save it, which nobody has taken yet."""
    rig = TierRig((16,), host=8, policy=AtPark())
    rig.submit("a", range(14), max_tokens=1)
    rig.drain()
    rig.now += 0.1
    rig.core.tick(rig.now)
    (save,) = rig.core.take_transfers()
    return rig, save


class TestTheMoverNotices:
    """The proof can fail: a page or slot used too early or twice is found by value."""

    def parked(self) -> TierRig:
        rig = TierRig((16,), host=8)
        rig.submit("a", range(14), max_tokens=1)
        rig.drain()
        rig.settle()
        assert rig.tiers.manager.host_used == 3
        return rig

    def test_a_page_that_is_read_before_its_load_has_ended(self) -> None:
        rig = self.parked()
        rig.core.kv.evict_all()
        rig.submit("a", range(20), max_tokens=1)
        (load,) = rig.core.take_transfers()
        slow = PRICES.__class__(**{**_fields(), "load": (9.0, 9.0)})
        mover = SimMover(rig.mover._memory, slow)
        mover._host = rig.mover._host
        mover.submit(load, rig.now)
        rig.core.finish_transfers([_claimed(load)], rig.now)  # a lie: it has not ended
        with pytest.raises(WrongKV):
            rig.drain()

    def test_a_slot_that_was_given_away(self) -> None:
        rig = self.parked()
        rig.core.kv.evict_all()
        rig.mover._host = {slot: (b"other", rows) for slot, (_, rows) in rig.mover._host.items()}
        rig.submit("a", range(20), max_tokens=1)
        with pytest.raises(WrongKV, match="host slot"):
            rig.drain()

    def test_a_page_that_changes_while_it_is_saved(self) -> None:
        rig, save = saving()
        rig.mover.submit(save, rig.now)
        rig.mover._memory[0][save.blocks[0].pages[0]] += 1
        with pytest.raises(WrongKV, match="changed"):
            rig.mover.poll(rig.now + 10)


def _fields() -> dict[str, object]:
    return {name: getattr(PRICES, name) for name in PRICES.__struct_fields__}


def _claimed(transfer):  # type: ignore[no-untyped-def]
    from tiering.types import TransferDone

    return TransferDone(transfer.id, (True,) * len(transfer.blocks), 0.0)


def test_the_disk_budget_of_the_rig_is_in_whole_blocks() -> None:
    manager = TierRig(host=4, disk=7).tiers.manager
    assert manager.disk_capacity == manager.disk_free == 7
    assert manager.disk_bytes == 7 * (BLOCK_BYTES + HEADER_BYTES)


class TestTakenBack:
    """The simulated mover as the real one: what waits goes whole, what is under way between two blocks."""

    def test_a_save_under_way_tells_what_it_moved(self) -> None:
        rig, save = saving()
        rig.mover.submit(save, rig.now)
        rig.mover.change(Change(save.id, Word.CANCEL), rig.now + 0.0015)
        (done,) = rig.mover.poll(rig.now + 1.0)
        assert (done.ok, done.cancelled) == ((True, True, False), False)
        assert rig.mover.pending == 0

    def test_one_that_waits_is_answered_at_once_and_the_one_before_it_is_not(self) -> None:
        rig, save = saving()
        other = Transfer(99, Move.SAVE, save.blocks)
        rig.mover.submit(save, rig.now)
        rig.mover.submit(other, rig.now)
        rig.mover.change(Change(99, Word.CANCEL), rig.now)
        rig.mover.change(Change(98, Word.CANCEL), rig.now)
        (done,) = rig.mover.poll(rig.now)
        assert (done.id, done.ok, done.cancelled) == (99, (False,) * 3, True)
        (done,) = rig.mover.poll(rig.now + 1.0)
        assert (done.id, done.ok) == (save.id, (True,) * 3)
