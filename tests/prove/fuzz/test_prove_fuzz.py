"""A real server under 10,000 mutated requests over all of its routes, bodies as large as may be and larger,
a thousand slow clients and half-finished calls: no crash, no 5xx, nothing left, no long stall."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.prove.fuzz.fuzz import NAMES, Fuzz, Report, Size, check, half_calls
from tests.prove.fuzz.loop_watch import LoopWatch
from tests.prove.fuzz.target import target

pytestmark = pytest.mark.process

SMALL = Size(
    requests=70, clients=8, heavy=0, slow=18, slow_seconds=1.2, calls=0, warming=20, patience=1.0
)  # fmt: skip
FULL = Size(
    requests=10_000,
    clients=10,
    heavy=8,
    slow=1000,
    slow_seconds=60.0,
    calls=40,
    warming=1000,
    warming_seconds=15.0,
    quiet_seconds=4.0,
)
LONGEST_STALL = 0.1  # seconds of the server's own fault
SLOW: dict[str, Any] = {"header_seconds": 8, "body_seconds": 12, "unread_seconds": 8}


def settings(folder: Path) -> Path:
    """Waits that are short, so that slow clients are seen to be ended."""
    file = folder / "config.toml"
    file.write_text("[http]\n" + "".join(f"{name} = {value}\n" for name, value in SLOW.items()))
    return file


async def fuzzed(folder: Path, size: Size, seed: int) -> Report:
    async with target(folder, config=settings(folder)) as server:
        return await Fuzz(server, size, seed).run()


def test_the_watch_tells_what_a_busy_loop_computed() -> None:
    """And not how long others had the machine meanwhile."""

    async def run() -> list[dict[str, Any]]:
        watch = LoopWatch()
        watch.start()
        await asyncio.sleep(0.05)
        watch.take()
        began = time.thread_time()
        while time.thread_time() < began + 0.15:
            pass
        await asyncio.sleep(0.05)
        watch.stop()
        return watch.take()

    worst = asyncio.run(run())[0]
    assert 0.13 < worst["loop_cpu"] <= worst["fault"] + 0.02 <= worst["late"] + 0.04


def test_fuzz_slice(tmp_path: Path, tell: Callable[[str], None]) -> None:
    report = asyncio.run(fuzzed(tmp_path, SMALL, 1))
    tell(report.line())
    check(report)


@pytest.mark.prove
def test_fuzz(tmp_path: Path, tell: Callable[[str], None], request: pytest.FixtureRequest) -> None:
    report = asyncio.run(fuzzed(tmp_path, FULL, 2))
    tell(report.line())
    file = request.config.getoption("--fuzz-report")
    if file is not None:
        Path(file).write_text(json.dumps(asdict(report), indent=1) + "\n")
    check(report)
    for kind in ("reply", "loud"):  # more than the system holds for them waited to be read: they were cut off
        assert report.slow_ends[f"{kind}: ended"] > 0, report.line()
        assert f"{kind}: left" not in report.slow_ends, report.line()
    assert report.longest_stall.get("fault", 0.0) < LONGEST_STALL, report.stalls[:3]


@pytest.mark.prove
@pytest.mark.parametrize("family", NAMES)
def test_half_finished_calls(family: str, tmp_path: Path, tell: Callable[[str], None]) -> None:
    async def run() -> None:
        async with target(tmp_path, tool_parser=family) as server:
            await server.state("start")
            server.stalls.clear()
            ends = await half_calls(server, family, FULL.calls, 3)
            server.check()
            worst = max(server.stalls, key=lambda stall: stall["fault"], default={"fault": 0.0})
            tell(f"{family}: {dict(ends)}, longest stall {worst['fault'] * 1000:.0f} ms {worst.get('where')}")
            assert worst["fault"] < LONGEST_STALL, worst

    asyncio.run(run())
