"""What a step costs outside the model: core, frames, socket, and the API side's decoding.

The worker runs in its own process with a model that takes no time; the API side's fleet reads
every token. The pause between two runs of the executor is the step's overhead: booking the last
result, sending the frame, applying commands, writing the next plan.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from array import array

from agentserve.bench.report import Row
from agentserve.messages import Submit, Token, TurnEnded, pack_tokens
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.supervisor import WorkerProcess, private_directory
from agentserve.types import Sampling, SessionId, TurnId

IDLE_WORKER = (sys.executable, "-P", "-m", "agentserve.bench.idle_worker")
LIMIT_SECONDS = 0.001


def measure(sessions: int = 64, context: int = 2000, tokens: int = 300) -> list[Row]:
    """Median and P99 pause between two runs of the executor while all sessions decode."""
    pauses = asyncio.run(_pauses(sessions, context, tokens))
    pauses.sort()
    name = f"core + IPC per step, {sessions} sessions decoding at {context} tokens"
    return [
        Row(f"{name}: median", statistics.median(pauses) * 1e3, "ms", LIMIT_SECONDS * 1e3, "1 ms"),
        Row(f"{name}: P99", pauses[int(len(pauses) * 0.99)] * 1e3, "ms"),
    ]


async def _pauses(sessions: int, context: int, tokens: int) -> list[float]:
    with private_directory() as directory:

        async def start(index: int) -> WorkerProcess:
            return await WorkerProcess.start(_spec(str(directory / f"{index}.sock"), sessions), IDLE_WORKER)

        fleet = Fleet(start, 1)
        await fleet.start()
        try:
            turns = [_follow(fleet, number, context, tokens) for number in range(sessions)]
            followed = await asyncio.gather(*turns)
        finally:
            await fleet.stop(5.0)
    # Every session sees the same pauses; only the middle, where all of them decode, counts.
    return followed[0][sessions // 8 : -sessions // 8]


async def _follow(fleet: Fleet, number: int, context: int, tokens: int) -> list[float]:
    history = array("i", [number + 1] + [token % 40_000 for token in range(context - 1)])
    command = Submit(
        SessionId(f"bench-{number}"),
        TurnId(1),
        pack_tokens(history),
        Sampling(max_tokens=tokens, ignore_eos=True, logprobs=0),
    )
    pauses = []
    async for event in fleet.submit(command):
        if isinstance(event, Token) and event.logprob:
            pauses.append(event.logprob)
        elif isinstance(event, TurnEnded) and event.error:
            raise RuntimeError(event.error)
    return pauses


def _spec(socket: str, sessions: int) -> WorkerSpec:
    return WorkerSpec(
        index=0,
        socket=socket,
        parent=os.getpid(),
        model="",
        dtype="bf16",
        weights="stored",
        activations="float",
        kv_dtype="auto",
        device="cpu",
        page_size=16,
        max_num_seqs=sessions,
        max_batched_tokens=1 << 18,
        max_model_len=None,
        max_step_seconds=None,
        device_kv=None,
        kv_share=1,
        threads=1,
        record=None,
        log_level="warning",
        chat_template=None,
    )
