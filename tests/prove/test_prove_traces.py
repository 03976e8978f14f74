"""The experiment at full size, in virtual time, on the H200-class model: what is asked of ours is found.

Some minutes a trace on a quiet core. `agentserve sim traces` is the same with more sessions and reports.
"""

from __future__ import annotations

import msgspec
import pytest

from agentserve.sim.experiment.cells import CellStore
from agentserve.sim.experiment.claims import claims
from agentserve.sim.experiment.engines import SloRule, entrant_named, promises
from agentserve.sim.experiment.record import Pace
from agentserve.sim.experiment.stage import Imagined
from agentserve.sim.experiment.study import Plan, Study
from agentserve.sim.experiment.synthetic import draw
from agentserve.sim.hardware import hardware_named

pytestmark = pytest.mark.prove

H200 = msgspec.structs.replace(hardware_named("h200-llama-8b"), page_size=128)
LADDER = ("fcfs", "decode-first", "chunked", "prefix-aware", "ours-no-tiers", "ours")
SESSIONS = {"chat": 600, "long": 60, "agents": 24, "mix": 600}
GUESS = {"chat": 16.0, "long": 0.1, "agents": 0.05, "mix": 2.0}


@pytest.mark.parametrize("pace", list(Pace), ids=lambda pace: pace.value)
@pytest.mark.parametrize("name", list(SESSIONS))
def test_what_is_asked_of_ours_is_found_at_full_size(name: str, pace: Pace) -> None:
    rule = SloRule(pace=pace)
    study = Study(Imagined(H200, host=0.0003), CellStore(None), promises(H200, rule), pace.value)
    plan = Plan(guess=GUESS[name], steps=(512, 1024, 2048, 8192), rates=(1.0, 1.25, 1.5), precision=0.1)
    trace = draw(name, SESSIONS[name])
    found = study.trace(trace, [entrant_named(each) for each in LADDER], plan)
    missed = [f"{claim.asked}: {claim.found}" for claim in claims([found]) if not claim.holds]
    assert not missed
