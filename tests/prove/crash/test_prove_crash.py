"""`kill -9` of worker and server, anywhere: nothing that a client was told is lost, and nothing is said
otherwise."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.prove.crash.book import Sizes
from tests.prove.crash.crash import Plan, crash
from tests.prove.crash.points import BY_NAME, POINTS, rounds
from tests.prove.crash.report import summary
from tests.prove.crash.tiny_model import write_tiny_model

pytestmark = pytest.mark.process

COMMON = {"max_batched_tokens": 256}
TINY = COMMON | {"max_model_len": 1200, "device_kv": "700KiB", "host_kv": "200KiB", "disk_kv": "2MiB"}
SMOLLM2 = COMMON | {"max_model_len": 1000, "device_kv": "24MiB", "host_kv": "8MiB", "disk_kv": "24MiB"}
NAMED = {"type": "function", "function": {"name": "weather"}}
SMALL = Sizes(words=40, rounds=1, call_tokens=60, text_tokens=12, temperature=0.0, choice=NAMED)
SAMPLE = ("commit.turn.after", "plan.ran", "disk.commit", "resume.read")
KILLS, OF_SMOLLM2 = 100, 12  # at named points, and as many at random


def tiny(folder: Path) -> dict[str, Any]:
    write_tiny_model(folder / "model")
    return TINY | {"model": str(folder / "model"), "served_model_name": "smollm2-135m"}


def test_crash_slice(tmp_path: Path, tell: Callable[[str], None]) -> None:
    plan = Plan(
        tiny(tmp_path), Sizes(), [BY_NAME[name] for name in SAMPLE], random_kills=1, agents=4, scripts=2
    )
    report = crash(tmp_path, plan)
    assert report.hits == Counter(SAMPLE)
    tell(report.line())


@pytest.mark.prove
@pytest.mark.model
def test_two_hundred_kills(
    tmp_path: Path, tell: Callable[[str], None], request: pytest.FixtureRequest
) -> None:
    """Two models: one that is fast, with every point hit, and one that means what it says."""
    few, many = rounds(OF_SMOLLM2, 5), rounds(KILLS - OF_SMOLLM2, 4)
    assert set(many) == set(POINTS)
    plans = {
        "tiny": Plan(tiny(tmp_path), Sizes(), many, random_kills=KILLS - OF_SMOLLM2, seed=4),
        "smollm2": Plan(SMOLLM2, SMALL, few, random_kills=OF_SMOLLM2, agents=4, scripts=6, gap=60, seed=5),
    }
    reports = []
    for name, plan in plans.items():
        (tmp_path / name).mkdir()
        reports.append(crash(tmp_path / name, plan))
        tell(reports[-1].line())
    told = summary(reports)
    assert (told["kills_at_named_points"], told["random_kills"]) == (KILLS, KILLS)
    assert told["hits_per_point"].keys() == BY_NAME.keys()
    file = request.config.getoption("--crash-report")
    if file is not None:
        Path(file).write_text(json.dumps(told, indent=2) + "\n")
