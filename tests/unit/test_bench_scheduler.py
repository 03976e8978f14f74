"""`agentserve bench scheduler`: its loads are what they are called, and its rows say what is asked."""

from __future__ import annotations

import pytest

from agentserve.bench.scheduler import ASKED_SIZE, REPLY, Rig, measure


@pytest.mark.parametrize(("load", "seats"), [("decode", 6), ("churn", 6), ("pages", 12)])
def test_loads(load: str, seats: int) -> None:
    rig = Rig("chunked", load, 6, 20)
    for _ in range(2 * REPLY):
        rig.step()
    scheduler, free = rig.core.scheduler, rig.core.kv.available
    assert len(scheduler.waiting) >= 10
    assert rig.core.config.max_num_seqs == seats
    if load == "pages":
        assert 3 < len(scheduler.running) < seats, "pages are short before seats are"
    else:
        assert len(scheduler.running) == seats
        assert free > seats * 20
    turns = len(rig.core.sessions)
    assert turns == 26 if load == "decode" else turns > 30, "turns end and others come"


def test_rows() -> None:
    told: list[str] = []
    rows = measure(["chunked", "rounds"], 1, told.append, ((2, 4), (4, 8)))
    assert told == [
        f"{policy}, {load}" for policy in ("chunked", "rounds") for load in ("decode", "churn", "pages")
    ]
    assert len(rows) == 2 * 3 * (2 * 2 + 1)
    assert all(row.value > 0 for row in rows if row.unit == "ms")
    assert not any(row.asked for row in rows), f"it is asked of {ASKED_SIZE}"
