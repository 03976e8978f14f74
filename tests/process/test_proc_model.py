"""The fleet over the real model: a killed worker's turn goes on with the very same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentserve.config import load
from agentserve.executor.runner import TorchExecutor
from agentserve.messages import Submit, Token, TurnEnded, pack_tokens
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.running import RunningTurn
from agentserve.server.workers.slot import RestartPolicy
from agentserve.server.workers.spec import worker_spec
from agentserve.server.workers.supervisor import WorkerFailed, WorkerProcess, private_directory
from agentserve.types import ReasoningCap, Sampling, SessionId, TurnId

pytestmark = [pytest.mark.process, pytest.mark.model]


@asynccontextmanager
async def fleet_of(**flags: object) -> AsyncIterator[Fleet]:
    config = load({"device_kv": "64MiB", "threads": 1, "log_level": "warning", **flags})
    with private_directory() as directory:

        async def start(index: int) -> WorkerProcess:
            path = str(directory / f"worker-{index}.sock")
            return await WorkerProcess.start(worker_spec(config, index, path, os.getpid(), cores=1))

        async with Fleet(start, config.workers.count, RestartPolicy(first_pause=0.01)) as fleet:
            yield fleet


async def run(turn: RunningTurn, kill_at: int | None = None, victim: int = 0) -> list[Token]:
    tokens: list[Token] = []
    async for event in turn:
        if isinstance(event, Token):
            tokens.append(event)
            if event.index == kill_at:
                os.kill(victim, signal.SIGKILL)
        if isinstance(event, TurnEnded):
            assert event.error == ""
    assert [token.index for token in tokens] == list(range(len(tokens)))
    return tokens


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
        Sampling(
            temperature=1.1,
            seed=7,
            top_p=0.95,
            repetition_penalty=1.2,
            frequency_penalty=0.4,
            min_tokens=30,
            max_tokens=40,
            logprobs=1,
        ),
        Sampling(
            temperature=0.9,
            seed=3,
            max_tokens=30,
            ignore_eos=True,
            logprobs=1,
            reasoning=ReasoningCap(16, close=200, inside=True),
        ),
    ],
)
async def test_a_moved_turn_says_the_same_bit_for_bit(sampling: Sampling) -> None:
    prompt = pack_tokens(array("i", range(100, 160)))
    async with asyncio.timeout(240), fleet_of() as fleet:
        whole = await run(fleet.submit(Submit(SessionId("a"), TurnId(1), prompt, sampling)))
        turn = fleet.submit(Submit(SessionId("b"), TurnId(1), prompt, sampling))
        moved = await run(turn, kill_at=11, victim=fleet.hello.pid)
        assert turn.moves == 1
        if sampling.reasoning is not None:
            assert whole[sampling.reasoning.tokens].token == sampling.reasoning.close
        assert [(token.token, token.logprob, token.top) for token in moved] == [
            (token.token, token.logprob, token.top) for token in whole
        ]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"model": "/nowhere.gguf"}, "/nowhere.gguf"),
        ({"device_kv": "100KB"}, "KV pool"),
        ({"max_step_ms": "0.001"}, "--max-step-ms 0.001: one token alone takes"),
        ({"max_model_len": 10**6}, "--max-model-len 1000000"),
        ({"device": "cuda:77"}, "cuda:77"),
    ],
)
async def test_what_cannot_start_is_one_line(flags: dict[str, object], error: str) -> None:
    with pytest.raises(WorkerFailed) as caught:
        async with asyncio.timeout(120), fleet_of(**flags):
            pass
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_truncated_model_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF" + b"\3\0\0\0" + b"\0" * 4)
    with pytest.raises(WorkerFailed, match=r"cut\.gguf") as caught:
        async with asyncio.timeout(120), fleet_of(model=str(file)):
            pass
    assert "\n" not in str(caught.value)


def test_rotary_tables_reach_as_far_as_the_pool_lets_a_session_come() -> None:
    """A file may name millions of positions: tables for all of them would be the largest thing in memory."""
    config = load({"device_kv": "4MiB", "threads": 1})
    built = build_engine(worker_spec(config, 0, "unused", os.getpid(), cores=1))
    assert isinstance(built.executor, TorchExecutor)
    assert built.hello.max_model_len < 1000
    hello = built.hello
    assert (hello.weights, hello.activations, hello.kv_dtype) == ("Q4_1/Q8_0", "float", "bf16")
    assert hello.backend_reason.startswith(hello.backend)
    assert built.executor._decoder.positions == built.hello.max_model_len
