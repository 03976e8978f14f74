"""`kill -9` of worker and server, anywhere: nothing that a client was told is lost, and nothing is said
otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prove.crash.agents import Sizes
from tests.prove.crash.crash import Plan, crash
from tests.prove.crash.points import BY_NAME
from tests.prove.crash.tiny_model import write_tiny_model

pytestmark = pytest.mark.process

TINY = {"device_kv": "700KiB", "host_kv": "200KiB", "disk_kv": "2MiB", "max_batched_tokens": 256}
SAMPLE = ("commit.turn.after", "plan.ran", "disk.commit", "resume.read")


def tiny(folder: Path) -> dict[str, object]:
    write_tiny_model(folder / "model")
    return TINY | {"model": str(folder / "model")}


def test_crash_slice(tmp_path: Path, tell: Callable[[str], None]) -> None:
    plan = Plan(tiny(tmp_path), Sizes(), [BY_NAME[name] for name in SAMPLE], random_kills=1, agents=4, scripts=2)
    tell(crash(tmp_path, plan).line())
