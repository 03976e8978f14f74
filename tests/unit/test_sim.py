"""The simulator: one seed, one history; a log replayed gives the same plans; nothing wedges."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agentserve.core.config import CoreConfig
from agentserve.core.plan import PageCopy
from agentserve.core.record import Commanded, Cut, Entry, decode_entries, encode_entry
from agentserve.messages import Submit
from agentserve.sim.executor import SimExecutor, WrongKV
from agentserve.sim.replay import ReplayError, replay
from agentserve.sim.run import Simulation
from agentserve.sim.workload import make_workload
from agentserve.types import FinishReason
from tests.crowds import COST, SMALL, oversubscribed
from tests.engines import Rig, cold


@pytest.mark.parametrize("first", range(0, 1000, 125))
def test_a_full_pool_always_finishes(first: int) -> None:
    """A thousand seeds, ten times oversubscribed: every agent finishes, and there was real pressure."""
    preemptions = 0
    for seed in range(first, first + 125):
        outcome = oversubscribed(seed)
        assert outcome.unfinished == (), f"seed {seed} wedged"
        assert {turn.reason for turn in outcome.turns} <= {FinishReason.STOP, FinishReason.LENGTH}
        preemptions += sum(turn.preemptions for turn in outcome.turns)
    assert preemptions > 100, "the pool was never under pressure"


def test_one_seed_one_history_and_another_seed_another() -> None:
    first, again, other = oversubscribed(4), oversubscribed(4), oversubscribed(5)
    assert first == again
    assert first.digests != other.digests


def test_pressure_changes_no_token() -> None:
    agents = make_workload(SMALL)

    def said(pages: int) -> dict[tuple[str, int], tuple[int, ...]]:
        config = CoreConfig(page_size=4, max_batched_tokens=32, max_num_seqs=8)
        outcome = Simulation(agents, config, pages=pages, cost=COST).run()
        return {(turn.agent, turn.turn): turn.output for turn in outcome.turns}

    assert said(40) == said(1000)


def test_a_recorded_log_replays_into_the_same_plans() -> None:
    log: list[Entry] = []
    outcome = oversubscribed(7, log=log)
    data = b"".join(encode_entry(entry) for entry in log)
    result = replay(decode_entries(data))
    assert result.plans == outcome.steps > 0
    assert result.differs_at is None


def test_a_changed_log_is_noticed() -> None:
    log: list[Entry] = []
    oversubscribed(7, log=log)
    at = next(i for i, entry in enumerate(log) if isinstance(entry, Commanded))
    entry = log[at]
    assert isinstance(entry, Commanded)
    assert isinstance(entry.command, Submit)
    shorter = Submit(
        entry.command.session, entry.command.turn, entry.command.tokens[:-16], entry.command.sampling
    )
    log[at] = Commanded(entry.now, shorter)
    assert replay(log).differs_at is not None


def test_a_log_that_was_cut_short_says_so() -> None:
    log: list[Entry] = []
    oversubscribed(7, log=log)
    data = b"".join(encode_entry(entry) for entry in log)
    for length in (len(data) - 1, len(data) // 2 + 1, 3):
        found = replay(decode_entries(data[:length])) if length > 2000 else None
        assert found is None or (found.cut and found.differs_at is None)
        assert isinstance(list(decode_entries(data[:length]))[-1], Cut)
    assert not replay(decode_entries(data)).cut


def test_a_log_must_say_how_the_core_was_built() -> None:
    with pytest.raises(ReplayError, match="opened"):
        replay([])


def test_the_executor_notices_wrong_kv() -> None:
    """The proof can fail: a copy left out, or a page written by someone else, is found by value."""
    rig = Rig()
    rig.submit("a", range(10), max_tokens=4)
    rig.drain()
    rig.submit("b", [*range(9), 50, 51], max_tokens=2)
    plan = rig.core.begin_step(1.0)
    assert plan is not None
    assert plan.copies
    with pytest.raises(WrongKV, match="position 8"):
        rig.executor.run(replace(plan, copies=()))
    first = plan.copies[0]
    wrong = PageCopy(first.group, (first.source + 1) % 30, first.target, first.slots)
    with pytest.raises(WrongKV):
        rig.executor.run(replace(plan, copies=(wrong,)))
    rig.core.finish_step(rig.executor.run(plan), 1.0)
    rig.drain()
    assert rig.output("b") == cold([*range(9), 50, 51], 2)


def test_the_executor_predicts_what_the_core_predicts() -> None:
    rig = Rig(cost=COST)
    executor = SimExecutor((32,), 4, COST)
    rig.submit("a", range(10))
    plan = rig.core.begin_step(0.0)
    assert plan is not None
    assert executor.run(plan).seconds == pytest.approx(plan.predicted_seconds)
