"""`agentserve serve` with the real model: a request, a killed worker in mid-stream, a drain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentserve.cli.chat import events
from agentserve.core.record import decode_entries
from agentserve.sim.replay import replay
from tests.process.serving import url_of

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "agentserve", "serve", "--port", "0", "--device-kv", "64MiB"]
    command += ["--threads", "1", "--record", str(tmp_path / "log"), "--max-step-ms", "2000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def worker_of(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def chat(client: httpx.Client, process: subprocess.Popen[str] | None = None) -> tuple[list[int], str]:
    """The token ids and the finish reason; with `process`, its worker is killed at the third piece."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Count from one to twenty in words."}],
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    reason = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        for event in events(reply.iter_lines()):
            assert "error" not in event, event
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
                reason = choice.get("finish_reason") or reason
            if process is not None and len(ids) >= 3:
                os.kill(worker_of(process), signal.SIGKILL)
                process = None
    assert process is None
    return ids, reason


def test_a_stream_outlives_its_worker_and_the_drain_leaves_nothing(
    server: subprocess.Popen[str], tmp_path: Path
) -> None:
    with httpx.Client(base_url=url_of(server), timeout=LIMIT) as client:
        whole = chat(client)
        assert len(whole[0]) == 24
        assert whole[1] == "length"
        assert chat(client, server) == whole
        assert client.get("/health").json()["workers"] == 1
        worker = worker_of(server)
        name = client.get("/agentserve/sessions").json()["data"][0]["id"]
        with client.stream("GET", f"/agentserve/sessions/{name}/events") as reply:
            followed = reply.iter_raw()
            told = next(followed)
            server.send_signal(signal.SIGTERM)
            told += b"".join(followed)
    assert b"event: turn_completed" in told
    assert b"shutting_down" not in told  # it ended by itself: a reader does not hold up the drain
    _, said = server.communicate(timeout=LIMIT)
    assert said.count("measured at the start") == 2  # measured by both workers
    assert server.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    # The new worker's log, written to its end, gives the same plans when replayed.
    result = replay(decode_entries((tmp_path / "log").read_bytes()))
    assert result.differs_at is None
    assert result.plans > 0
