"""A served model over several ranks: processes of their own that come, fail and go together."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.process.serving import serving
from tests.thinking_model import ANSWER, THOUGHT, save_thinking_model

pytestmark = pytest.mark.process
PATIENCE = 300
SAID = ("".join(THOUGHT).strip(), "".join(ANSWER))


def processes(parent: int, module: str) -> list[int]:
    """The children of a process that run a module of ours."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in map(int, children) if module in Path(f"/proc/{pid}/cmdline").read_text()]


def group_of(server: int) -> tuple[int, int]:
    """The worker and its follower. (The worker's other child is a fork of its own, for grammars.)"""
    [worker] = processes(server, "workers.worker")
    [follower] = processes(worker, "workers.follower")
    return worker, follower


def vanishes(pid: int) -> bool:
    """Whether a process, of which this one is no parent, ends, or has ended but for its parent's look."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def ask(client: httpx.Client, *more: dict[str, str]) -> tuple[str, str]:
    messages = [{"role": "user", "content": "Weather?"}, *more]
    body = {"model": "m", "messages": messages, "temperature": 0}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    message = reply.json()["choices"][0]["message"]
    return message["reasoning"].strip(), message["content"].strip()


def test_a_group_serves_and_is_replaced_as_one(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_thinking_model(tmp_path / "m")
    flags = ("--model", str(tmp_path / "m"), "--device-kv", "8MiB", "--tensor-parallel", "2")
    with serving(*flags, patience=PATIENCE) as (client, server), ThreadPoolExecutor() as pool:
        assert ask(client) == SAID
        worker, follower = group_of(server.pid)
        os.kill(follower, signal.SIGSTOP)  # so that the turn is in the middle of a step
        turn = pool.submit(ask, client)
        time.sleep(0.2)
        assert not turn.done()
        os.kill(follower, signal.SIGKILL)
        assert turn.result() == SAID  # by the group that came in its place
        assert vanishes(worker)
        history = {"role": "assistant", "content": SAID[1]}, {"role": "user", "content": "And now?"}
        assert ask(client, *history) == SAID
        worker, follower = group_of(server.pid)
        os.kill(worker, signal.SIGKILL)
        assert vanishes(follower)


@pytest.mark.prove
def test_a_rank_that_stands_still_is_replaced_with_its_group(tmp_path: Path) -> None:
    """Nobody is told that it does, its worker waits for it within a step: that is silent for too long."""
    (tmp_path / "m").mkdir()
    save_thinking_model(tmp_path / "m")
    flags = ("--model", str(tmp_path / "m"), "--device-kv", "8MiB", "--tensor-parallel", "2")
    with serving(*flags, "--hang-seconds", "10", patience=PATIENCE) as (client, server):
        assert ask(client) == SAID
        worker, follower = group_of(server.pid)
        os.kill(follower, signal.SIGSTOP)
        assert ask(client) == SAID
        assert vanishes(worker)
        assert vanishes(follower)


@pytest.mark.prove
@pytest.mark.model
def test_a_real_model_is_served_by_three_ranks() -> None:
    with serving("--device-kv", "64MiB", "--tensor-parallel", "3", patience=PATIENCE) as (client, _):
        body = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 12}
        reply = client.post("/v1/chat/completions", json={"model": "smollm2-135m", **body})
        assert reply.json()["choices"][0]["message"]["content"].startswith("Hello")
