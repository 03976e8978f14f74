"""The shoot-out: a machine that takes its time, worlds that end, standings that say what happened."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.plan import Plan
from agentserve.messages import WorkerView
from agentserve.sim.hardware import Hardware, hardware_named
from agentserve.sim.shootout import contest as contests
from agentserve.sim.shootout.contest import (
    Arena,
    Entrant,
    Setting,
    Standing,
    Trial,
    contest,
    run_all,
    trace_of,
    tune,
)
from agentserve.sim.shootout.entrants import ARENA, build_core, entrant_names, entrants, receive_hint
from agentserve.sim.shootout.machine import VirtualMover, transfer_seconds
from agentserve.sim.shootout.report import COLUMNS, ShootOut, cells, charts, table, tables, write_charts
from agentserve.sim.shootout.world import VOCAB_SIZE, Outcome, World
from agentserve.sim.traces.demand import lanes_for
from agentserve.sim.traces.draw import TraceSpec
from agentserve.sim.traces.hints import NEVER, HintMix, RawHint
from agentserve.sim.traces.players import Players
from agentserve.types import KVGroup
from tiering.policy.base import Hints
from tiering.policy.priced import PricedPolicy
from tiering.types import Block, Change, Move, Transfer, Word

SMALL = msgspec.structs.replace(
    hardware_named("tiny"), name="small", device_kv=1_600_000, host_kv=800_000, disk_kv=6_400_000
)
TWICE, FOURFOLD = Setting("small", 2.0), Setting("small", 4.0)
SECONDS = 6.0


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of these tests is known by its name."""
    monkeypatch.setattr(contests, "hardware_named", {"small": SMALL}.__getitem__)


def trial(name: str, setting: Setting = FOURFOLD, seed: int = 1, seconds: float = SECONDS) -> Outcome:
    (entrant,) = entrants([name])
    return contests.run_trial(ARENA, Trial(setting, entrant, seed, seconds))


# --- the machine -----------------------------------------------------------------------------------


def test_what_waits_in_the_machine_is_hurried_or_taken_back_and_what_runs_is_not() -> None:
    mover = VirtualMover(SMALL)
    block = Block(b"k" * 32, b"", b"")
    mover.submit([Transfer(number, Move.LOAD, (block,)) for number in range(1, 5)], 0.0)
    mover.change(
        Change(number, word) for number, word in ((1, Word.CANCEL), (4, Word.HURRY), (2, Word.CANCEL))
    )
    (back,) = mover.done_by(0.0)
    assert (back.id, back.ok, back.cancelled) == (2, (False,), True)
    assert [(done.id, done.ok) for done in mover.done_by(1.0)] == [(1, (True,)), (4, (True,)), (3, (True,))]
    assert mover.next_done() is None


def transfer(number: int, move: Move, blocks: int = 1, *, urgent: bool = False) -> Transfer:
    return Transfer(number, move, (Block(b"k", b"p", b""),) * blocks, urgent)


def test_transfers_take_their_time_one_after_the_other_and_urgent_ones_first() -> None:
    mover = VirtualMover(SMALL)
    mover.submit([transfer(1, Move.SAVE, 10), transfer(2, Move.SAVE, 10)], 1.0)
    mover.submit([transfer(3, Move.LOAD, 10, urgent=True)], 1.0)
    each = transfer_seconds(transfer(1, Move.SAVE, 10), SMALL)
    assert each == pytest.approx(1e-4 + 10 * SMALL.block_bytes / 1e9)
    assert mover.next_done() == pytest.approx(1.0 + each)
    done = mover.done_by(1.0 + 2.5 * each)
    assert [one.id for one in done] == [1, 3]
    assert [one.seconds for one in done] == pytest.approx([each, each])
    assert all(one.ok == (True,) * 10 for one in done)
    assert mover.next_done() == pytest.approx(1.0 + 3 * each)
    assert mover.blocks[Move.SAVE] == 10
    assert mover.done_by(0.0) == []


def test_a_slow_disk_does_not_hold_up_the_host() -> None:
    mover = VirtualMover(SMALL)
    mover.submit([transfer(1, Move.WRITE, 1000), transfer(2, Move.LOAD)], 0.0)
    assert [one.id for one in mover.done_by(0.01)] == [2]
    assert mover.next_done() == pytest.approx(1e-3 + 1000 * SMALL.block_bytes / 1e8)


def test_an_idle_queue_begins_when_it_is_asked_to() -> None:
    mover = VirtualMover(SMALL)
    assert mover.next_done() is None
    mover.submit([transfer(1, Move.DROP)], 5.0)
    assert mover.next_done() == pytest.approx(5.0 + SMALL.disk_latency)


# --- worlds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", entrant_names())
def test_every_policy_plays_without_a_wedge_and_leaves_nothing_live(name: str) -> None:
    """World.run checks the core's invariants, and that no page is live, before it answers."""
    for seed in (1, 2):
        outcome = trial(name, seed=seed)
        assert outcome.wedged == ""
        assert outcome.failed == 0
        assert outcome.turns > 20


def test_one_seed_one_outcome_and_another_seed_another() -> None:
    assert trial("priced") == trial("priced") != trial("priced", seed=2)


@pytest.mark.parametrize("mix", [HintMix.HOSTILE, HintMix.MIXED])
def test_hostile_clients_wedge_nobody(mix: HintMix) -> None:
    for seed in range(3):
        outcome = trial("priced", Setting("small", 10.0, mix, events=True), seed, 6.0)
        assert outcome.wedged == ""
        assert outcome.failed == 0


def test_pressure_is_felt_and_tiers_take_it_off() -> None:
    """The shoot-out measures something: under pressure resumes wait, and without copies they compute."""
    roomy, tight = trial("lru", Setting("small", 0.5)), trial("lru", Setting("small", 6.0))
    assert tight.oversubscribed > 3 * roomy.oversubscribed
    assert tight.resume_ttft_p95 > 3 * roomy.resume_ttft_p95
    assert tight.moved["load"] > 0
    without = msgspec.structs.replace(SMALL, host_kv=0, disk_kv=0)
    bare, tiered = world(without, FOURFOLD), world(SMALL, FOURFOLD)
    without_copies, with_copies = (each.run(0.2 * SECONDS, SECONDS) for each in (bare, tiered))
    assert sum(without_copies.moved.values()) == 0
    assert with_copies.recomputed / with_copies.turns < without_copies.recomputed / without_copies.turns


def world(hardware: Hardware, setting: Setting, core: EngineCore | None = None) -> World:
    spec = trace_of(hardware, setting, 1)
    lanes = lanes_for(spec, setting.oversubscription * hardware.pool_tokens)
    core = core or build_core(hardware, entrants(["lru"])[0], spec)
    return World(hardware, core, Players(spec, lanes, VOCAB_SIZE, receive_hint))


class Stuck(EngineCore):
    """After some steps it plans nothing more."""

    left = 50

    def begin_step(self, now: float) -> Plan | None:
        self.left -= 1
        return super().begin_step(now) if self.left > 0 else None


def test_a_wedge_is_found_and_told() -> None:
    config = CoreConfig(page_size=SMALL.page_size, max_batched_tokens=SMALL.max_batched_tokens)
    core = Stuck(config, (KVGroup("full", (0,), 1),), (SMALL.pages,), SMALL.step_cost())
    outcome = world(SMALL, TWICE, core).run(1.0, 10_000.0)
    assert "turns want one" in outcome.wedged or "nothing will happen" in outcome.wedged
    assert outcome.steps < 50


class Keeper(EngineCore):
    """Says that a page is held for ever."""

    def view(self) -> WorkerView:
        return msgspec.structs.replace(super().view(), pages_live=1)


def test_what_is_held_when_all_has_ended_is_told() -> None:
    config = CoreConfig(page_size=SMALL.page_size, max_batched_tokens=SMALL.max_batched_tokens)
    core = Keeper(config, (KVGroup("full", (0,), 1),), (SMALL.pages,), SMALL.step_cost())
    assert world(SMALL, TWICE, core).run(0.1, 0.5).wedged == "left at the end: 1 live pages"


# --- entrants ------------------------------------------------------------------------------------------


def test_everybody_is_there_with_published_parameters() -> None:
    names = entrant_names()
    assert {"lru", "pin", "infercept", "continuum", "thunderagent", "mori", "priced", "oracle"} <= set(names)
    assert names[-1] == "oracle"
    for entrant in entrants(names):
        assert ARENA.accepts(entrant)
    with pytest.raises(ValueError, match="there are: ") as caught:
        entrants(["lru", "belady"])
    assert "\n" not in str(caught.value)


def test_foreign_parameters_are_not_accepted() -> None:
    mori, priced = entrants(["mori", "priced"])
    assert not ARENA.accepts(Entrant("mori", priced.parameters))
    assert not ARENA.accepts(Entrant("priced", mori.parameters))


def test_a_core_gets_the_machines_tiers_and_the_oracle_the_truth() -> None:
    spec = trace_of(SMALL, TWICE, 1)
    core = build_core(SMALL, entrants(["oracle"])[0], spec)
    view = core.view()
    assert view.pages == SMALL.pages == 200
    assert view.tiers is not None
    assert view.tiers.policy == "oracle"
    assert (view.tiers.host_slots, view.tiers.disk_budget) == (100, SMALL.disk_kv)
    assert core.tiers is not None
    assert isinstance(core.tiers.policy, PricedPolicy)


def test_hints_go_through_the_servers_own_check() -> None:
    assert receive_hint(RawHint(2.5), 100.0).expected_wait == 2.5
    for nonsense in (float("nan"), -1.0, float("inf")):
        assert receive_hint(RawHint(nonsense), 100.0).expected_wait is None
    lie = receive_hint(RawHint(NEVER, priority=1_000_000), 100.0)
    assert lie.expected_wait is None or lie.expected_wait <= 1e6
    assert abs(lie.priority) < 1000
    assert receive_hint(RawHint(), 0.0) == Hints()


# --- standings -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standings() -> list[Standing]:
    """A tiny shoot-out over all policies: two settings, two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contests, "hardware_named", {"small": SMALL}.__getitem__)
        field = entrants(entrant_names())
        return contest(ARENA, [TWICE, FOURFOLD], lambda name: field, [1, 2], seconds=lambda name: SECONDS)


def test_a_standing_for_every_policy_in_every_setting(standings: list[Standing]) -> None:
    assert [(each.setting, each.policy) for each in standings] == [
        (setting, name) for setting in (TWICE, FOURFOLD) for name in entrant_names()
    ]
    for standing in standings:
        assert len(standing.outcomes) == 2
        assert standing.turns_per_second == pytest.approx(
            sum(outcome.turns_per_second for outcome in standing.outcomes) / 2
        )
        assert standing.oversubscribed == pytest.approx(standing.setting.oversubscription, rel=0.4)
        assert not standing.wedged


def test_the_oracle_has_no_regret_and_lru_is_as_good_as_itself(standings: list[Standing]) -> None:
    for standing in standings:
        if standing.policy == "oracle":
            assert standing.of_oracle == 1.0
        if standing.policy == "lru":
            assert standing.least_of_lru == 1.0
    by_name = {each.policy: each for each in standings if each.setting == FOURFOLD}
    oracle, mori = by_name["oracle"], by_name["mori"]
    expected = [
        mine.turns_per_second / theirs.turns_per_second
        for mine, theirs in zip(mori.outcomes, oracle.outcomes, strict=True)
    ]
    assert mori.of_oracle == pytest.approx(sum(expected) / 2)


def test_without_an_oracle_or_lru_there_is_nothing_to_compare_with() -> None:
    (found,) = contest(ARENA, [TWICE], lambda name: entrants(["mori"]), [1], seconds=lambda name: 4.0)
    assert found.of_oracle is None
    assert found.least_of_lru is None
    assert cells(found)[2:4] == ["", ""]


def test_trials_in_other_processes_come_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contests, "hardware_named", hardware_named)  # other processes know no other
    setting = Setting("cpu-smollm2", 1.0)
    trials = [Trial(setting, entrant, 1, 5.0) for entrant in entrants(["lru", "priced"])]
    assert list(run_all(ARENA, trials, jobs=2)) == list(run_all(ARENA, trials, jobs=1))


def test_of_many_traces_the_sums_stay_and_few_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contests, "MOST_OUTCOMES", 1)
    hasty = msgspec.structs.replace(TWICE, gap=0.01)
    assert trace_of(SMALL, hasty, 1).gap == 0.01 != trace_of(SMALL, TWICE, 1).gap
    (found,) = contest(
        ARENA, [hasty], lambda hardware: entrants(["lru"]), [1, 2], seconds=lambda hardware: 1.0
    )
    turns = [trial("lru", hasty, seed, 1.0).turns for seed in (1, 2)]
    assert (found.turns, found.least_turns, len(found.outcomes)) == (sum(turns), min(turns), 1)


def test_every_policy_is_tuned_by_the_same_budget_on_seeds_that_are_not_reported() -> None:
    seen: dict[str, list[Trial]] = {}
    field = entrants(["mori", "priced", "lru"])

    def build(hardware: Hardware, entrant: Entrant, spec: TraceSpec) -> EngineCore:
        seen.setdefault(entrant.name, []).append(Trial(TWICE, entrant, spec.seed, 0.0))
        return build_core(hardware, entrant, spec)

    arena = Arena(build, receive_hint, ARENA.accepts)
    tuned = tune(arena, "small", field, oversubscription=2.0, budget=3, seeds=2, seconds=3.0)
    assert [each.name for each in tuned] == ["mori", "priced", "lru"]
    assert len(seen["mori"]) == len(seen["priced"]) == 6
    for name in ("mori", "priced"):
        trials = seen[name]
        assert {one.seed for one in trials} == {1_000_000, 1_000_001}
        assert trials[0].entrant.parameters == next(each.parameters for each in field if each.name == name)
    assert tuned[2] == field[2]


# --- what is shown ---------------------------------------------------------------------------------------


def test_a_table_has_a_row_per_policy_and_says_what_was_measured(standings: list[Standing]) -> None:
    found = tables(standings)
    assert len(found) == 2
    own = [each for each in standings if each.setting == FOURFOLD]
    shown = table(FOURFOLD, own)
    assert shown.row_count == len(entrant_names())
    assert [column.header for column in shown.columns] == list(COLUMNS)
    assert "small, 4×, hints none" in str(shown.title)
    for standing in own:
        row = cells(standing)
        assert len(row) == len(COLUMNS)
        assert row[0] == standing.policy
        assert row[1] == f"{standing.turns_per_second:.3f}"


def test_the_report_is_json_and_comes_back(standings: list[Standing]) -> None:
    seconds = {"small": SECONDS}
    report = ShootOut("agentserve sim policies", {"x": "1"}, [1, 2], seconds, 0, [SMALL], standings)
    read = msgspec.json.decode(msgspec.json.encode(report))
    assert read["benchmark"] == "policies"
    assert len(read["standings"]) == 2 * len(entrant_names())
    first = read["standings"][0]
    assert set(first) == set(Standing.__struct_fields__)
    setting = {"hardware": "small", "oversubscription": 2.0, "hints": "none", "events": False, "gap": None}
    assert first["setting"] == setting
    assert set(first["moved"]) == {move.value for move in Move}
    assert read["hardware"][0]["how"] == list(SMALL.how)
    assert report.wedged == []


def test_a_wedge_is_in_the_report(standings: list[Standing]) -> None:
    broken = msgspec.structs.replace(standings[0], wedged=("at 3.0 s: time stands still",))
    report = ShootOut("", {}, [1], {}, 0, [], [broken])
    assert report.wedged == [f"{broken.policy}, {broken.setting}: at 3.0 s: time stands still"]
    assert cells(broken)[-1] == "1"


def test_charts_are_written_per_machine(standings: list[Standing], tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    drawn = charts(standings)
    assert set(drawn) == {f"small-none-{kind}.svg" for kind in ("oracle", "turns", "resume", "again")}
    assert all(drawn[name].count("<polyline") == len(entrant_names()) for name in drawn)
    paths = write_charts(standings, tmp_path / "deep" / "er")
    assert sorted(path.name for path in paths) == sorted(drawn)
    assert paths[0].read_text(encoding="utf-8").startswith("<svg")
