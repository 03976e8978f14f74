"""Contestants as real processes: they die, hang, talk nonsense, and nothing of them is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentserve.bench.compare import keeper
from agentserve.bench.compare.child import Child, peer_environment
from agentserve.bench.compare.contest import PeerFailed, held
from agentserve.bench.compare.drivers import loop
from agentserve.bench.compare.piped import Piped
from agentserve.bench.compare.plan import Scenario
from agentserve.bench.compare.result import Facts
from agentserve.bench.compare.served import Served, free_port, wait_ready

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
LIMIT = 60.0  # no test waits for it
AT_ONCE = 0.3
FACTS = Facts("made-up server", "7", {})


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    command = [sys.executable, str(HERE / "fake_peer_driver.py")]
    with Child("made-up peer", command, tmp_path, os.environ, piped=True) as made:
        yield made
    assert made.ended


def started(child: Child, limit: float = LIMIT, **orders: object) -> Piped:
    return Piped(child, {"given": 7, **orders}, LIMIT, limit)


def decode(length: int) -> Scenario:
    return Scenario("decode", 2, length, 8)


def state(process: int) -> str:
    """Its letter in /proc; "X", for dead, when it is not there."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def gone(process: int) -> bool:
    """Whether it has ended; a zombie has."""
    return state(process) in "ZX"


def test_rates_of_a_peer_that_works(child: Child) -> None:
    peer = started(child)
    assert peer.facts.settings == {"given": 7}
    assert peer.facts.version == "0.1"
    figure = peer.run(decode(100), 0)
    assert figure.rate == pytest.approx(2 / 0.25)  # the first two steps are not counted
    assert figure.prompt_tokens == 200
    assert peer.run(Scenario("prefill", 1, 400), 0).rate == pytest.approx(400 / 2)
    assert peer.run(Scenario("prefill", 8, 20_000), 0).rate > 0  # a line that fits into no pipe
    assert "hello from a library" in child.log.read_text()  # and not among the answers
    assert peer.cpu_seconds() > 0


def test_one_stands_still_while_another_runs(child: Child) -> None:
    peer = started(child)
    processes = list(keeper.descendants(child.keeper))
    assert processes
    with held([peer]):
        while (found := {state(process) for process in processes}) != {"T"}:
            assert "X" not in found  # gone instead
            time.sleep(0.01)
    assert not {state(process) for process in processes} & {"T", "X"}
    assert peer.run(decode(100), 0).rate > 0


@pytest.mark.parametrize(
    ("orders", "error"),
    [
        ({"start": "refuse"}, "starting: ValueError: no such model"),
        ({"start": "exit"}, "starting: it ended (exit status 3)"),
    ],
)
def test_a_peer_that_cannot_start(child: Child, orders: dict[str, object], error: str) -> None:
    with pytest.raises(PeerFailed) as caught:
        started(child, **orders)
    assert str(caught.value).startswith(f"made-up peer: {error}")
    assert str(caught.value).endswith(f"; its output is in {child.log}")
    assert "\n" not in str(caught.value)


def test_a_peer_that_never_starts(child: Child) -> None:
    with pytest.raises(PeerFailed, match=r"starting: no answer in 0\.3 s; its output"):
        Piped(child, {"given": 1, "start": "sleep"}, AT_ONCE, LIMIT)


@pytest.mark.parametrize(
    ("length", "error"),
    [
        (11, "it ended (killed by signal 9)"),
        (12, "it wrote what is no answer: b'warming up...'"),
        (14, "MemoryError: too much"),
        (15, "no usable times"),
    ],
)
def test_a_peer_that_fails_in_a_run(child: Child, length: int, error: str) -> None:
    peer = started(child)
    peer.run(decode(100), 0)
    with pytest.raises(PeerFailed) as caught:
        peer.run(decode(length), 0)
    assert f"decode, 2 x {length} tokens" in str(caught.value)
    assert error in str(caught.value)
    assert str(child.log) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_peer_that_hangs(child: Child) -> None:
    peer = started(child, limit=AT_ONCE)
    with pytest.raises(PeerFailed, match=r"decode, 2 x 13 tokens: no answer in 0\.3 s"):
        peer.run(decode(13), 0)


def test_stopping_ends_orphans_in_other_sessions_too(child: Child) -> None:
    settings = started(child, start="family").facts.settings
    orphan, main = settings["orphan"], settings["pid"]
    assert isinstance(orphan, int)
    assert isinstance(main, int)
    assert os.getsid(orphan) != os.getsid(main)
    child.stop()
    assert gone(main)
    assert gone(orphan)
    child.stop()


def test_a_peer_whose_main_process_dies_leaves_nothing(child: Child) -> None:
    peer = started(child, start="family")
    orphan = peer.facts.settings["orphan"]
    assert isinstance(orphan, int)
    with pytest.raises(PeerFailed):
        peer.run(decode(11), 0)
    child.stop()
    assert gone(orphan)


OWNER = """
import os, signal, sys, time
from pathlib import Path
from agentserve.bench.compare import keeper
from agentserve.bench.compare.child import Child
from agentserve.bench.compare.piped import Piped
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs behind itself
with Child("peer", [sys.executable, sys.argv[1]], Path(sys.argv[2]), os.environ, piped=True) as child:
    facts = Piped(child, {"given": 1, "start": "family"}, 60, 60).facts
    print(facts.settings["pid"], facts.settings["orphan"], flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_peers_do_not_outlive_us_however_we_end(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, str(HERE / "fake_peer_driver.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        processes = [int(word) for word in owner.stdout.readline().split()]
        assert len(processes) == 2
        assert not any(map(gone, processes))
        owner.send_signal(number)
        owner.wait()
    until = time.monotonic() + LIMIT
    while not all(map(gone, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    assert all(map(gone, processes))


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with Child("nobody", ["/nowhere/python"], tmp_path, os.environ, piped=True) as child:
        with pytest.raises(PeerFailed, match=r"nobody: starting: it ended \(exit status 127\)"):
            started(child)
        assert "/nowhere/python: No such file" in child.log.read_text()


@pytest.mark.parametrize(
    ("name", "module"), [("openvino", "openvino_genai"), ("llamacpp", "numpy|llama_cpp")]
)
def test_drivers_need_nothing_of_ours(tmp_path: Path, name: str, module: str) -> None:
    """-I: neither this checkout nor PYTHONPATH is looked at. What is missing first is the peer's."""
    command = [sys.executable, "-I", loop.__file__, name]
    missing = pytest.raises(PeerFailed, match=f"No module named '({module})'")
    with Child(name, command, tmp_path, peer_environment(), piped=True) as child, missing:
        Piped(child, {}, LIMIT, LIMIT)
    assert not [name for name in peer_environment({"A": "b"}) if name.startswith("PYTHON")]
    assert peer_environment({"A": "b"})["A"] == "b"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path


def serving(mode: str, logs: Path) -> tuple[Child, str]:
    port = free_port()
    command = [sys.executable, str(HERE / "fake_peer_server.py"), str(port), mode]
    return Child("made-up server", command, logs, peer_environment()), f"http://127.0.0.1:{port}"


def test_rates_of_a_server_that_works(logs: Path) -> None:
    child, url = serving("works", logs)
    with child:
        assert wait_ready(child, url, LIMIT) == "7"
        server = Served(child, url, FACTS, LIMIT)
        figure = server.run(Scenario("decode", 3, 20, 3), 0)
        assert figure.rate > 0
        assert figure.prompt_tokens == 60
        assert server.run(Scenario("prefill", 1, 50, 3), 0).prompt_tokens == 50
    assert child.ended


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("refuses", "HTTP 400: "),
        ("stops", "2 of 3 tokens, in spite of ignore_eos"),
        ("caches", "9 prompt tokens were cached"),
        ("errs", "out of memory"),
        ("dies", "its stream broke off (exit status 5)"),
        ("hangs", "no answer in 0.3 s"),
    ],
)
def test_a_server_that_fails_in_a_run(logs: Path, mode: str, error: str) -> None:
    child, url = serving(mode, logs)
    with child:
        wait_ready(child, url, LIMIT)
        server = Served(child, url, FACTS, AT_ONCE if mode == "hangs" else LIMIT)
        with pytest.raises(PeerFailed) as caught:
            server.run(Scenario("decode", 2, 20, 3), 0)
    assert str(caught.value).startswith("made-up server: decode, 2 x 20 tokens: ")
    assert error in str(caught.value)
    assert str(child.log) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "limit", "error"),
    [
        ("never", AT_ONCE, "not ready after 0.3 s"),
        ("ends", LIMIT, "it ended before it was ready (exit status 1)"),
    ],
)
def test_a_server_that_does_not_start(logs: Path, mode: str, limit: float, error: str) -> None:
    child, url = serving(mode, logs)
    with child, pytest.raises(PeerFailed) as caught:
        wait_ready(child, url, limit)
    assert str(caught.value) == f"made-up server: {error}; its output is in {child.log}"


@pytest.mark.model
def test_our_engine_behind_the_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "agentserve.bench.compare.ours"]
    flags = {"device_kv": "32MiB", "threads": "1", "dtype": "bf16"}
    with Child("agentserve", command, tmp_path, os.environ, piped=True) as child:
        ours = Piped(child, {"flags": flags}, 240, 240)
        assert ours.facts.settings["dtype"] == "bf16"
        for scenario in (Scenario("decode", 2, 40, 4), Scenario("prefill", 1, 40)):
            assert ours.run(scenario, 0).rate > 0


@pytest.mark.model
def test_our_server_counts_and_ignores_eos(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-P", "-m", "agentserve", "serve", "--port", str(port)]
    command += [
        "--device-kv",
        "32MiB",
        "--threads",
        "1",
        "--served-model-name",
        "m",
        "--log-level",
        "warning",
    ]
    with Child("agentserve", command, tmp_path, os.environ) as child:
        url = f"http://127.0.0.1:{port}"
        wait_ready(child, url, 240)
        server = Served(child, url, FACTS, 240)
        figure = server.run(Scenario("decode", 2, 30, 6), 0)
        assert figure.rate > 0
        assert 55 <= figure.prompt_tokens <= 80
        assert server.run(Scenario("prefill", 1, 50), 0).rate > 0
        processes = list(keeper.descendants(child._process.pid))
        assert len(processes) >= 2  # the server and its worker
    assert all(map(gone, processes))
