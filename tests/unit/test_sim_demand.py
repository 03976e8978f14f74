"""Lanes are chosen so that contexts alive come to what was asked for."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.cli.sim_policies import SECONDS
from agentserve.sim.hardware import hardware_named
from agentserve.sim.traces.demand import lanes_for, live_tokens
from agentserve.sim.traces.draw import TraceSpec


@pytest.mark.parametrize("name", SECONDS)  # the tiny machine is too small for that
@pytest.mark.parametrize("times", [2, 4])
def test_the_demand_is_the_one_asked_for(name: str, times: int) -> None:
    hardware = hardware_named(name)
    spec = TraceSpec(**msgspec.structs.asdict(hardware.trace))
    lanes = lanes_for(spec, times * hardware.pool_tokens)
    assert live_tokens(spec, lanes) / hardware.pool_tokens == pytest.approx(times, rel=0.2)


def test_more_lanes_more_demand() -> None:
    demand = [live_tokens(TraceSpec(), lanes) for lanes in (2, 8, 32)]
    assert demand == sorted(demand)
    assert demand[2] > 8 * demand[0]
    assert lanes_for(TraceSpec(), 1.0) == 1
