"""Real server processes, bad clients, killed workers: nothing is lost, leaked, or said otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.prove.soak import Said, Settings, soak
from tests.prove.soak_worker import answer

pytestmark = pytest.mark.process

MADE_UP = Settings(acts=40, clients=12, kills=2, max_tokens=200, text_tokens=200, pause=0.6)
REAL = Settings(
    acts=7,
    clients=3,
    kills=1,
    max_tokens=60,
    text_tokens=12,
    pause=2.0,
    tool_choice={"type": "function", "function": {"name": "weather"}},
)
SERVE = (sys.executable, "-m", "agentserve", "serve", "--port", "0", "--device-kv", "32MiB")


def undisturbed(said: Said) -> bool:
    return list(said.ids) == answer(said.prompt)


def made_up(workers: int, page_size: int) -> tuple[str, ...]:
    script = str(Path(__file__).with_name("soak_server.py"))
    return (sys.executable, script, str(workers), str(page_size))


def test_soak_slice(tell: Callable[[str], None]) -> None:
    tell(f"seed 1: {soak(made_up(2, 16), MADE_UP, 1, undisturbed)}")


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(2, 12))
def test_soak(seed: int, tell: Callable[[str], None]) -> None:
    settings = replace(MADE_UP, acts=600, clients=4 + seed * 3, kills=4, pause=3.0)
    tell(f"seed {seed}: {soak(made_up(1 + seed % 3, (4, 16, 32)[seed % 3]), settings, seed, undisturbed)}")


@pytest.mark.model
def test_soak_of_the_real_model_slice(tell: Callable[[str], None]) -> None:
    command = (*SERVE, "--threads", "1", "--log-level", "error")
    tell(f"seed 1: {soak(command, REAL, 1, None)}")


@pytest.mark.prove
@pytest.mark.model
@pytest.mark.parametrize("seed", range(2, 5))
def test_soak_of_the_real_model(seed: int, tell: Callable[[str], None]) -> None:
    command = (*SERVE, "--workers", str(1 + seed % 2), "--log-level", "error")
    settings = replace(REAL, acts=60, clients=8, kills=4, text_tokens=40, pause=8.0)
    tell(f"seed {seed}: {soak(command, settings, seed, None)}")
