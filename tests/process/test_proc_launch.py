"""The launched server as a process: start-up errors, readiness, drain, signals, and no orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.process.fake_worker import reference

pytestmark = pytest.mark.process

Start = Callable[..., subprocess.Popen[str]]
LIMIT = 30.0  # seconds until a wait is called a hang


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def launch(*error: str, port: int = 0, drain: float = 20) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("fake_server.py")
        process = subprocess.Popen(
            [sys.executable, str(script), str(port), str(drain), str(tmp_path / "crashed"), *error],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        processes.append(process)
        return process

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def gone(pid: int) -> bool:
    """Dead, or dead and not yet reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "hung"
        time.sleep(0.01)


def tokens(lines: list[str]) -> list[int]:
    return [int(line) for line in lines if not line.startswith("#")]


def test_a_worker_that_crashes_over_its_kv_on_disk_is_started_without_it(start: Start) -> None:
    """LMDB aborts the process that reads some damaged pages: that must not stop every start."""
    process = start("abort")
    assert httpx.get(f"{url_of(process)}/health", timeout=LIMIT).json()["alive"]


def test_a_client_never_sees_its_worker_die(start: Start) -> None:
    url = url_of(start())
    reply = httpx.get(f"{url}/generate/crash4-a/12", timeout=LIMIT)
    assert tokens(reply.text.splitlines()) == reference([5, 6, 7], 12)
    assert "worker lost" in reply.text


def test_without_workers_the_server_leaves_with_an_error(start: Start) -> None:
    """Five quick deaths: a service manager can start the whole anew, which 503 for good would hide."""
    process = start()
    url = url_of(process)
    for session in ("poison-a", "poison-b"):
        with suppress(httpx.HTTPError):
            httpx.get(f"{url}/generate/{session}/5", timeout=LIMIT)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("agentserve: no worker is left: ")
    assert "Traceback" not in err
    assert out == "lifespan ended\n"


def test_sigterm_lets_running_turns_finish_then_leaves_nothing(start: Start) -> None:
    process = start()
    url = url_of(process)
    worker = httpx.get(f"{url}/health").json()["pid"]
    lines: list[str] = []
    with httpx.stream("GET", f"{url}/generate/slow-a/50", timeout=LIMIT) as reply:
        for line in reply.iter_lines():
            lines.append(line)
            if len(tokens(lines)) == 2 and not line.startswith("#"):
                process.send_signal(signal.SIGTERM)
    assert tokens(lines) == reference([5, 6, 7], 50)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert out == "lifespan ended\n"
    assert gone(worker)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def read_endless(url: str, act: Callable[[int], None]) -> None:
    """Read a turn that would take half an hour; `act` gets the number of each line. Must end early."""
    with (
        suppress(httpx.HTTPError),
        httpx.stream("GET", f"{url}/generate/slow-a/100000", timeout=LIMIT) as reply,
    ):
        for number, _ in enumerate(reply.iter_lines()):
            assert number < 50_000
            act(number)


def test_the_drain_has_a_limit(start: Start) -> None:
    process = start(drain=0)
    url = url_of(process)
    worker = httpx.get(f"{url}/health").json()["pid"]
    read_endless(url, lambda number: process.send_signal(signal.SIGTERM) if number == 3 else None)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert gone(worker)


def test_a_second_signal_ends_at_once(start: Start) -> None:
    process = start(drain=1000)
    url = url_of(process)
    worker = httpx.get(f"{url}/health").json()["pid"]
    signals = {3: signal.SIGINT, 20: signal.SIGTERM}
    seen: list[int] = []

    def act(number: int) -> None:
        seen.append(number)
        if number in signals:
            process.send_signal(signals[number])

    read_endless(url, act)
    process.communicate(timeout=LIMIT)
    assert max(seen) >= 20  # the first signal alone did not cut the turn
    assert gone(worker)


def test_no_orphan_and_no_litter_after_the_parent_is_killed(start: Start, tmp_path: Path) -> None:
    process = start()
    url = url_of(process)
    worker = httpx.get(f"{url}/health").json()["pid"]
    read_endless(url, lambda number: process.kill() if number == 3 else None)
    until(lambda: gone(worker))
    assert list(tmp_path.glob("tmp/agentserve-*")) == []


def test_a_signal_while_starting_leaves_nothing(start: Start) -> None:
    process = start("sleep")  # the worker never gets ready
    worker = child_of(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert out == ""
    assert gone(worker)


def child_of(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: bool(children.read_text().split()))
    return int(children.read_text().split()[0])


def test_a_bad_model_is_one_line_before_the_port_opens(start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start("model x: no tensor blk.0", port=port)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert out == ""
    assert err == "agentserve: model x: no tensor blk.0\n"


def test_a_taken_port_is_one_line(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(port=port)
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert err == f"agentserve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_signal_to_the_whole_group_does_not_take_the_workers(start: Start) -> None:
    """What a service manager does: SIGTERM to every process of the service."""
    process = start()
    url = url_of(process)
    worker = httpx.get(f"{url}/health").json()["pid"]
    lines: list[str] = []
    with httpx.stream("GET", f"{url}/generate/slow-a/30", timeout=LIMIT) as reply:
        for line in reply.iter_lines():
            lines.append(line)
            if len(tokens(lines)) == 2 and not line.startswith("#"):
                os.kill(worker, signal.SIGTERM)
                process.send_signal(signal.SIGTERM)
    assert tokens(lines) == reference([5, 6, 7], 30)
    assert "worker lost" not in "".join(lines)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert gone(worker)


def test_a_worker_gets_the_environment_of_workers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    worker = httpx.get(f"{url_of(start())}/health").json()["pid"]
    variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    assert b"GOMP_SPINCOUNT=1000" in variables
