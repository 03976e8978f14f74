"""Sustained overload in virtual time: shares of tenants, and a bound on waiting."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.sim.experiment.cells import CellResult, CellStore
from agentserve.sim.experiment.claims import LEAST_SHARE, OVERLOAD, claims
from agentserve.sim.experiment.clients import Load
from agentserve.sim.experiment.engines import SloRule, entrant_named, promises
from agentserve.sim.experiment.knee import Knee
from agentserve.sim.experiment.script import Trace
from agentserve.sim.experiment.stage import Imagined
from agentserve.sim.experiment.study import Stand, Study, TraceStudy
from agentserve.sim.experiment.synthetic import Lengths, draw
from agentserve.sim.hardware import hardware_named

TINY = msgspec.structs.replace(hardware_named("tiny"), device_kv=8_000_000)
PATIENCE = 4.0  # of the default policy


def overloaded(name: str, trace: Trace) -> CellResult:
    study = Study(Imagined(TINY), CellStore(None), promises(TINY, SloRule(ttft=2.0, tbt=0.5)), "")
    return study.cell(trace, entrant_named(name), Load(60.0))


@pytest.fixture(scope="module")
def chats() -> Trace:
    return draw("chat", 150, lengths=Lengths(chat_prompt=120, chat_output=8))


def test_no_tenant_is_below_nine_tenths_of_its_weighted_share_while_backlogged(chats: Trace) -> None:
    ours, plain = overloaded("ours-no-tiers", chats), overloaded("chunked", chats)
    assert ours.longest_wait > 2 * PATIENCE  # it is an overload
    assert ours.fairness.least_share is not None
    assert ours.fairness.least_share >= LEAST_SHARE
    assert plain.fairness.least_share is not None
    assert plain.fairness.least_share < LEAST_SHARE  # who comes first knows no weights
    assert ours.fairness.jain is not None
    assert ours.fairness.jain > 0.95
    assert ours.fairness.largest_gap is not None
    assert plain.fairness.largest_gap is not None
    assert ours.fairness.largest_gap < plain.fairness.largest_gap / 3


def test_a_late_turn_enters_after_a_bounded_number_of_others_of_its_tenant() -> None:
    """The bound on waiting, in an overload that lasts: resumes go before new prompts and turns that can be in
    time before late ones, and still nobody is passed for ever."""
    lengths = Lengths(
        shared_prefix=16, own_prefix=480, agent_turns=5, agent_append=16, agent_output=4, longest_wait=1.0
    )
    found = overloaded("ours-no-tiers", draw("agents", 40, lengths=lengths))
    assert found.longest_wait > 2 * PATIENCE
    assert found.longest_overtaking > 1.0
    assert 0.05 < found.late_entries <= 1.0


def test_claims_are_of_runs_in_overload_and_of_equals(chats: Trace) -> None:
    ours, plain = overloaded("ours-no-tiers", chats), overloaded("chunked", chats)
    knee = Knee(60.0 / OVERLOAD, 60.0, {})
    stands = tuple(
        Stand(entrant_named(name), knee, (result,), ())
        for name, result in (("chunked", plain), ("ours-no-tiers", ours))
    )
    study = TraceStudy("chat", chats.digest, 150, 150, 1.0, chats.weights, stands)
    made = {claim.asked: claim for claim in claims([study])}
    assert len(made) == 3
    (share,) = (claim for asked, claim in made.items() if "share" in asked)
    assert share.holds
    (goodput,) = (claim for asked, claim in made.items() if "goodput" in asked)
    assert "next chunked" in goodput.found
    calm = msgspec.structs.replace(
        study, stands=tuple(msgspec.structs.replace(s, knee=Knee(60.0, 61.0, {})) for s in stands)
    )
    assert len(claims([calm])) == 1
