"""The loop's own watch: how late its ticks were, on a clock that moves when a test says so."""

from __future__ import annotations

import asyncio

import pytest

from agentserve.clock import VirtualClock
from agentserve.metrics import Metrics
from agentserve.server.stalls import StallWatch
from tests.api_rig import settled


async def ticked(clock: VirtualClock, passed: float) -> list[float]:
    """What is told of one tick, when so much time has passed until it came."""
    found: list[float] = []
    ticks = 0

    def now() -> float:
        nonlocal ticks
        ticks += 1
        return clock.now()

    watch = StallWatch(found.append, now, interval=0.001)
    watch.start()
    clock.advance_to(clock.now() + passed)
    await settled(lambda: ticks > 2)
    watch.stop()
    return found


async def test_a_tick_in_time_is_not_told_and_a_late_one_is() -> None:
    clock = VirtualClock()
    assert await ticked(clock, 0.001) == []
    assert await ticked(clock, 0.0105) == []
    assert await ticked(clock, 0.251) == [pytest.approx(0.25)]
    assert await ticked(clock, 0.001) == []


async def test_it_goes_on_until_it_is_stopped() -> None:
    clock = VirtualClock()
    asked = 0

    def now() -> float:
        nonlocal asked
        asked += 1
        return clock.now()

    watch = StallWatch(lambda late: None, now, interval=0.001)
    watch.start()
    await settled(lambda: asked > 6)
    watch.stop()
    watch.stop()
    before = asked
    await asyncio.sleep(0.01)
    assert asked == before


def test_metrics_tell_the_longest() -> None:
    metrics = Metrics()
    for late in (0.015, 0.3, 0.02):
        metrics.stalled(late)
    page = metrics.render().decode()
    assert "agentserve_event_loop_longest_stall_seconds 0.3\n" in page
    assert 'agentserve_event_loop_stall_seconds_bucket{le="0.1"} 2.0\n' in page
    assert "agentserve_event_loop_stall_seconds_count 3.0\n" in page
