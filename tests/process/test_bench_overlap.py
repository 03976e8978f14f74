"""`agentserve bench overlap` with workers whose model is a pause."""

from __future__ import annotations

import os

import pytest

from agentserve.bench import overlap
from agentserve.bench.overlap import Differs, Subject, measure, subjects
from agentserve.config import load
from agentserve.server.workers.spec import worker_spec


def device() -> Subject:
    spec = worker_spec(load({}, None), 0, "", os.getpid(), 1)
    _, shortest, _ = subjects(spec, (1,))
    return Subject("device", shortest.orders, (2,), shortest.command)


def test_it_alternates_and_tells_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "TOKENS", 8)
    told: list[str] = []
    rows = {row.name: row for row in measure([device()], 1, told.append)}
    assert len(told) == 2  # the first warms up
    assert len(rows["with overlap"].runs) == len(rows["without"].runs) == 2
    assert all(milliseconds > 5 for milliseconds in rows["with overlap"].runs)
    assert rows["without / with"].value > 0
    assert "gained" in rows


def test_another_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "TOKENS", 8)
    run, count = overlap._run, 0

    async def lies(*args: object) -> overlap.Ran:
        nonlocal count
        count += 1
        ran = await run(*args)  # type: ignore[arg-type]
        return overlap.Ran(ran.step, [[count]])

    monkeypatch.setattr(overlap, "_run", lies)
    with pytest.raises(Differs, match="something else"):
        measure([device()], 1, lambda _: None)
