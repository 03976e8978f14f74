"""The fleet over real worker processes with a made-up model: death, moves, restarts, orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentserve.config import load
from agentserve.messages import Submit, Token, TurnEnded, pack_tokens
from agentserve.server.engine_port import EngineDown
from agentserve.server.workers.fleet import MAX_MOVES, Fleet
from agentserve.server.workers.loop import STEP_FAILED
from agentserve.server.workers.running import RunningTurn
from agentserve.server.workers.slot import RestartPolicy
from agentserve.server.workers.spec import worker_spec
from agentserve.server.workers.supervisor import WorkerFailed, WorkerProcess, private_directory
from agentserve.types import FinishReason, Sampling, SessionId, SessionState, TurnId
from tests.process.fake_worker import reference

pytestmark = pytest.mark.process

PROMPT = [5, 6, 7]


def submit(session: str, count: int, turn: int = 1, grammar: str | None = None) -> Submit:
    sampling = Sampling(max_tokens=count, grammar=grammar)
    return Submit(SessionId(session), TurnId(turn), pack_tokens(array("i", PROMPT)), sampling)


async def collect(turn: RunningTurn) -> tuple[list[int], TurnEnded, list[SessionState]]:
    tokens, states, ended = [], [], None
    async for event in turn:
        if isinstance(event, Token):
            assert event.index == len(tokens)
            tokens.append(event.token)
        elif isinstance(event, TurnEnded):
            assert ended is None
            ended = event
        else:
            states.append(event.state)
    assert ended is not None
    return tokens, ended, states


@asynccontextmanager
async def fleet_of(
    count: int, marker: Path, *more: str, policy: RestartPolicy | None = None, hang: float = 60.0
) -> AsyncIterator[Fleet]:
    config = load({"workers": count, "log_level": "warning"})
    script = str(Path(__file__).with_name("fake_worker.py"))
    with private_directory() as directory:

        async def start(index: int) -> WorkerProcess:
            path = str(directory / f"worker-{index}.sock")
            spec = worker_spec(config, index, path, os.getpid(), cores=1)
            return await WorkerProcess.start(spec, (sys.executable, script, str(marker), *more))

        quick = policy or RestartPolicy(first_pause=0.01, longest_pause=0.05)
        async with asyncio.timeout(60), Fleet(start, count, quick, hang_seconds=hang) as fleet:
            yield fleet


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("after", [0, 1, 7, 19])
async def test_a_turn_survives_its_worker(tmp_path: Path, workers: int, after: int) -> None:
    async with fleet_of(workers, tmp_path / "crashed") as fleet:
        tokens, ended, states = await collect(fleet.submit(submit(f"crash{after}-a", 20)))
        assert (tmp_path / "crashed").exists()
        assert tokens == reference(PROMPT, 20)
        assert ended.reason is FinishReason.LENGTH
        assert (ended.usage.prompt, ended.usage.generated, ended.usage.preemptions) == (3, 20, 1)
        assert SessionState.PREEMPTED in states


async def test_every_turn_of_a_dead_worker_goes_on(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path / "crashed") as fleet:
        turns = [fleet.submit(submit(f"s{n}", 30)) for n in range(6)]
        turns.append(fleet.submit(submit("crash5-x", 30)))
        results = await asyncio.gather(*(collect(turn) for turn in turns))
        assert all(tokens == reference(PROMPT, 30) for tokens, _, _ in results)


async def test_a_kill_from_outside_is_seen_at_once_and_the_worker_replaced(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path / "no") as fleet:
        first = fleet.hello.pid
        turn = fleet.submit(submit("slow-a", 40))
        async for event in turn:
            if isinstance(event, Token) and event.index == 2:
                os.kill(first, signal.SIGKILL)
                break
        rest = [event async for event in turn]
        tokens = [event.token for event in rest if isinstance(event, Token)]
        assert tokens == reference(PROMPT, 40)[3:]
        assert fleet.alive == 1
        assert is_gone(first)


async def test_a_worker_that_hangs_is_killed_and_its_turns_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_of(1, tmp_path / "no", hang=1.0) as fleet:
        first = fleet.hello.pid
        tokens: list[int] = []
        async for event in fleet.submit(submit("slow-a", 10)):
            if isinstance(event, Token):
                tokens.append(event.token)
                if event.index == 2:
                    os.kill(first, signal.SIGSTOP)
        assert tokens == reference(PROMPT, 10)
        assert is_gone(first)
        assert "said nothing for 1 s: killed" in caplog.text


async def test_a_stopped_worker_that_is_asked_for_its_state_is_replaced(tmp_path: Path) -> None:
    """No turn waits for it, yet whoever reads the health of the server does."""
    async with fleet_of(1, tmp_path / "no", hang=0.4) as fleet:
        first = fleet.hello.pid
        os.kill(first, signal.SIGSTOP)
        await fleet.describe()
        while not is_gone(first):  # noqa: ASYNC110  (the fleet tells nobody)
            await asyncio.sleep(0.01)


async def test_a_session_stays_with_its_worker_and_strangers_spread(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path / "no") as fleet:
        turns = [fleet.submit(submit(f"slow-{n}", 3)) for n in range(4)]
        assert sorted(turn.slot for turn in turns if turn.slot is not None) == [0, 0, 1, 1]
        await asyncio.gather(*(collect(turn) for turn in turns))
        homes = [turn.slot for turn in turns]
        assert [fleet.submit(submit(f"slow-{n}", 2, turn=2)).slot for n in (3, 2, 1, 0)] == homes[::-1]


async def test_a_turn_that_kills_every_worker_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    policy = RestartPolicy(first_pause=0.01, longest_pause=0.02, attempts=MAX_MOVES + 2)
    async with fleet_of(1, tmp_path / "no", policy=policy) as fleet:
        tokens, ended, _ = await collect(fleet.submit(submit("poison-a", 5)))
        assert tokens == []
        assert ended.reason is FinishReason.ERROR
        assert "died" in ended.error
        tokens, ended, _ = await collect(fleet.submit(submit("good", 5)))
        assert tokens == reference(PROMPT, 5)


async def test_too_many_quick_deaths_end_the_fleet_with_an_error_not_a_hang(tmp_path: Path) -> None:
    policy = RestartPolicy(first_pause=0.01, longest_pause=0.02, attempts=2)
    async with fleet_of(1, tmp_path / "no", policy=policy) as fleet:
        _, ended, _ = await collect(fleet.submit(submit("poison-a", 5)))
        assert ended.reason is FinishReason.ERROR
        assert ended.error == "no worker is left"
        assert fleet.alive == 0
        with pytest.raises(EngineDown):
            fleet.submit(submit("b", 1))


async def test_abort_ends_a_turn_also_while_no_worker_lives(tmp_path: Path) -> None:
    policy = RestartPolicy(first_pause=30.0)
    async with fleet_of(1, tmp_path / "no", policy=policy) as fleet:
        turn = fleet.submit(submit("slow-a", 1000))
        async for event in turn:
            if isinstance(event, Token):
                break
        fleet.abort(SessionId("slow-a"), TurnId(1))
        ended = [event async for event in turn][-1]
        assert isinstance(ended, TurnEnded)
        assert ended.reason is FinishReason.ABORTED
        os.kill(fleet.hello.pid, signal.SIGKILL)
        while fleet.alive:  # noqa: ASYNC110  (the fleet tells nobody)
            await asyncio.sleep(0.01)
        waiting = fleet.submit(submit("b", 5))
        fleet.abort(SessionId("b"), TurnId(1))
        fleet.abort(SessionId("b"), TurnId(1))
        assert [event.reason async for event in waiting] == [FinishReason.ABORTED]


async def test_an_executor_that_raises_fails_its_turns_only(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path / "no") as fleet:
        _, ended, _ = await collect(fleet.submit(submit("raises-a", 5)))
        assert ended.reason is FinishReason.ERROR
        assert ended.error == STEP_FAILED
        tokens, _, _ = await collect(fleet.submit(submit("good", 5)))
        assert tokens == reference(PROMPT, 5)


async def test_grammars_reach_every_worker_also_the_replaced_one(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path / "crashed") as fleet:
        await fleet.define_grammar("g", "good")
        await fleet.define_grammar("b", "bad")
        tokens, _, _ = await collect(fleet.submit(submit("crash2-a", 6, grammar="g")))
        assert tokens == reference(PROMPT, 6)
        for name in ("b", "unknown"):
            _, ended, _ = await collect(fleet.submit(submit("c", 6, grammar=name)))
            assert ended.reason is FinishReason.REFUSED
            assert name in ended.error


async def test_views_outlive_a_worker(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path / "crashed") as fleet:
        await collect(fleet.submit(submit("a", 9)))
        view = await fleet.describe(SessionId("a"))
        assert view.session is not None
        assert (await fleet.describe(SessionId("never seen"))).session is None
        await collect(fleet.submit(submit("crash4-b", 6)))
        assert len((await fleet.describe()).workers) == 1
        assert await fleet.reset_prefix_cache()


async def test_a_bad_model_is_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"^model x: no such file$"):
        async with fleet_of(2, tmp_path / "no", "model x: no such file"):
            pass


async def test_a_stranger_on_the_socket_is_turned_away(tmp_path: Path) -> None:
    script, go = Path(__file__).with_name("fake_worker.py"), tmp_path / "go"
    # The worker connects only when the stranger has been and gone; exec keeps its process id.
    wait = f"while [ ! -e {go} ]; do sleep 0.01; done; exec {sys.executable} {script} {tmp_path / 'no'}"
    with private_directory() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        path = directory / "worker.sock"
        spec = worker_spec(load({}), 0, str(path), os.getpid(), cores=1)
        starting = asyncio.create_task(WorkerProcess.start(spec, ("sh", "-c", wait)))
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert path.stat().st_mode & 0o777 == 0o600
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STRANGER, str(path), stdout=subprocess.PIPE
        )
        out, _ = await stranger.communicate()
        assert out == b"turned away\n"
        go.touch()
        worker = await starting
        assert worker.hello.backend == "made-up"
        assert not path.exists()
        await worker.end(5.0)


STRANGER = """
import socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.settimeout(20)
peer.connect(sys.argv[1])
try:
    peer.sendall(b"\\0\\0\\0\\5GET /")
    assert peer.recv(1) == b""
except ConnectionError:
    pass
print("turned away")
"""


async def test_a_worker_that_speaks_nonsense_is_killed_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with private_directory() as directory:
        pids: list[int] = []

        async def start(index: int) -> WorkerProcess:
            path = directory / f"worker-{len(pids)}.sock"
            spec = worker_spec(load({}), index, str(path), os.getpid(), cores=1)
            worker = await WorkerProcess.start(spec, (sys.executable, "-c", BABBLER))
            pids.append(worker.pid)
            return worker

        policy = RestartPolicy(first_pause=0.01, attempts=2)
        async with asyncio.timeout(60), Fleet(start, 1, policy) as fleet:
            _, ended, _ = await collect(fleet.submit(submit("a", 5)))
            assert ended.reason is FinishReason.ERROR
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)
    assert "dropped: a frame of" in caplog.text


BABBLER = """
import sys, time
from pathlib import Path
import msgspec
from agentserve.messages import PROTOCOL_VERSION, Hello
from agentserve.server.workers.link import WorkerLink
from agentserve.server.workers.spec import WorkerSpec

spec = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec)
link = WorkerLink.connect(Path(spec.socket))
shown = ("b", "", "cpu", "bf16", "expanded", "float", "bf16", 1, 1, 1, 1, 1, 1, 1, "", "")
link.send(Hello(PROTOCOL_VERSION, 0, *shown))
link._socket.sendall(b"\\xff" * 64)
time.sleep(3600)
"""


async def test_stop_ends_turns_and_leaves_no_process(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path / "no") as fleet:
        turn = fleet.submit(submit("slow-a", 1000))
        pids = [slot.worker.pid for slot in fleet._slots if slot.worker]
        assert len(pids) == 2
    events = [event async for event in turn]
    assert events[-1].reason is FinishReason.ERROR
    assert all(is_gone(pid) for pid in pids)
