"""Knees and their causes: the search, and bottlenecks that were planted in an imagined machine."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.sim.experiment.cause import Cause
from agentserve.sim.experiment.cells import CellStore
from agentserve.sim.experiment.clients import Load
from agentserve.sim.experiment.engines import SloRule, entrant_named, promises
from agentserve.sim.experiment.knee import find_knee
from agentserve.sim.experiment.script import Trace
from agentserve.sim.experiment.stage import Imagined
from agentserve.sim.experiment.study import KneeCause, Plan, Study
from agentserve.sim.experiment.synthetic import Lengths, draw
from agentserve.sim.hardware import Hardware, hardware_named

TINY = msgspec.structs.replace(
    hardware_named("tiny"),
    per_token=2e-4,
    device_kv=16_000_000,
    host_kv=64_000_000,
    disk_kv=0,
    max_batched_tokens=256,
    save_rate=1e9,
    load_rate=1e9,
)
SLO = SloRule(ttft=3.0, tbt=1.0)
CONTEXT = 384 * TINY.kv_token_bytes


def chats(sessions: int, output: int) -> Trace:
    lengths = Lengths(chat_prompt=320, chat_output=output)
    return draw("chat", sessions, lengths=lengths, tenants={"all": 1.0})


def agents(sessions: int, turns: int) -> Trace:
    lengths = Lengths(
        shared_prefix=16,
        own_prefix=304,
        agent_turns=turns,
        agent_append=24,
        agent_output=4,
        shortest_wait=1.0,
    )
    return draw("agents", sessions, lengths=lengths, tenants={"all": 1.0})


def slow_link(sessions: int, turns: int) -> tuple[Hardware, float, Trace, float]:
    hardware = msgspec.structs.replace(
        TINY, device_kv=2_400_000, per_token=5e-3, save_rate=1e6, load_rate=1e6
    )
    return hardware, 0.0, agents(sessions, turns), 0.25


SLOW_COMPUTE = (msgspec.structs.replace(TINY, per_token=2e-3), 0.0, chats(30, 4), 2.0)
SMALL_POOL = (msgspec.structs.replace(TINY, device_kv=round(1.7 * CONTEXT)), 0.0, chats(24, 48), 4.0)
SLOW_LINK = slow_link(12, 12)
SLOW_HOST = (msgspec.structs.replace(TINY, per_token=1e-5), 0.02, chats(40, 16), 100.0)


def study_of(hardware: Hardware, host: float) -> Study:
    return Study(Imagined(hardware, host), CellStore(None), promises(hardware, SLO), "test")


# --- the search ---------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [0.1, 7.3, 900.0])
def test_the_knee_is_found_to_two_and_a_half_percent_from_any_guess(guess: float) -> None:
    found = find_knee(lambda rate: 1.0 if rate <= 7.3 else 0.5, guess)
    assert found.found
    assert found.above is not None
    assert found.rate <= 7.3 < found.above <= found.rate * 1.025
    assert len(found.probed) < 20


def test_without_a_knee_the_search_ends_and_says_so() -> None:
    always = find_knee(lambda rate: 1.0, 1.0)
    assert (always.found, always.above) == (False, None)
    never = find_knee(lambda rate: 0.0, 1.0)
    assert (never.found, never.rate) == (False, 0.0)
    with pytest.raises(ValueError, match="above 0"):
        find_knee(lambda rate: 1.0, 0.0)


def test_nine_in_ten_is_enough() -> None:
    assert find_knee(lambda rate: 0.9 if rate <= 2 else 0.899, 1.0).rate == pytest.approx(2.0, rel=0.025)


# --- planted bottlenecks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (SLOW_COMPUTE, Cause.COMPUTE),
        (SMALL_POOL, Cause.KV),
        (SLOW_LINK, Cause.LINK),
        (SLOW_HOST, Cause.HOST),
    ],
    ids=["slow compute", "small pool", "slow link", "slow host"],
)
def test_a_planted_bottleneck_is_named(planted: tuple[Hardware, float, Trace, float], named: Cause) -> None:
    hardware, host, trace, rate = planted
    name = "ours" if named is Cause.LINK else "ours-no-tiers"
    result = study_of(hardware, host).cell(trace, entrant_named(name), Load(rate))
    assert result.evidence.cause is named, result.evidence


def test_nothing_is_blamed_where_nothing_is_short() -> None:
    found = study_of(TINY, 0.0).cell(chats(20, 8), entrant_named("ours-no-tiers"), Load(0.5))
    assert found.evidence.cause is Cause.NONE, found.evidence
    assert found.figures.attainment == 1.0


def confirmed(planted: tuple[Hardware, float, Trace, float], name: str) -> KneeCause:
    """What a planted bottleneck's knee is found to be due to; knees to a tenth."""
    hardware, host, trace, rate = planted
    study, entrant = study_of(hardware, host), entrant_named(name)
    plan = Plan(guess=rate, precision=0.1)
    knee = study.knee(trace, entrant, plan)
    assert knee.found
    return study.cause(trace, entrant, knee, plan, dict(Imagined(hardware, host).with_more()))


def test_more_of_what_is_blamed_moves_the_knee_and_more_of_others_does_not() -> None:
    found = confirmed(SLOW_COMPUTE, "ours-no-tiers")
    assert found.said == "compute"
    assert found.confirmed, found.interventions
    blamed = {each.more_of: each.moved for each in found.interventions}
    assert blamed["compute"] > 0.15
    assert max(blamed["KV"], blamed["swap bandwidth"]) < 0.05
    wrong = msgspec.structs.replace(found, said="KV")
    assert not wrong.confirmed


@pytest.mark.prove
@pytest.mark.parametrize(
    ("planted", "name", "said"),
    [
        (SMALL_POOL, "ours-no-tiers", "KV"),
        (slow_link(24, 20), "ours", "swap bandwidth"),
        ((*SLOW_HOST[:2], chats(150, 32), 64.0), "ours-no-tiers", "host"),
    ],
    ids=["small pool", "slow link", "slow host"],
)
def test_each_planted_bottleneck_is_confirmed(
    planted: tuple[Hardware, float, Trace, float], name: str, said: str
) -> None:
    found = confirmed(planted, name)
    assert found.said == said, found.at.evidence
    assert found.confirmed, found.interventions
