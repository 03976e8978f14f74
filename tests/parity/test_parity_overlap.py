"""Overlap on the real executor: the same tokens as in turn, and a log that replays (INV-133)."""

from __future__ import annotations

import io
import random
import socket
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
import torch

from agentserve.clock import WallClock
from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.record import (
    RECORD_VERSION,
    Commanded,
    Finished,
    Opened,
    Planned,
    decode_entries,
    encode_entry,
)
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import TorchExecutor
from agentserve.executor.sampler import Sampler
from agentserve.messages import (
    Abort,
    Command,
    Describe,
    Event,
    Fork,
    Shutdown,
    StepDone,
    Submit,
    Token,
    TurnEnded,
    pack_tokens,
)
from agentserve.models.decoder import Decoder
from agentserve.server.workers.link import FrameDecoder, WorkerLink, encode_frame
from agentserve.server.workers.loop import WorkerLoop
from agentserve.server.workers.recorder import Recorder
from agentserve.sim.replay import replay
from agentserve.types import FinishReason, KVGroup, Sampling, SessionId, TurnId
from kernels import ops_for
from tests.parity.harness import CPU, VOCAB
from tests.parity.test_parity_engine import tiny

CONFIG = CoreConfig(page_size=16, max_model_len=256, max_num_seqs=4, max_batched_tokens=32)
PAGES = 14  # less than four turns come to: some are preempted
Script = Mapping[int, Sequence[Command]]


@dataclass
class Run:
    said: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ended: dict[tuple[str, int], TurnEnded] = field(default_factory=dict)
    log: bytes = b""


def run(script: Script, *, overlap: bool) -> Run:
    """A worker's loop in a thread. `script[n]` arrives while step n computes; 0: before the first."""
    config, weights = tiny("llama", torch.bfloat16)
    pool = KVPool(config, [PAGES], CONFIG.page_size, torch.bfloat16)
    sampler = Sampler(VOCAB, [b"x"] * VOCAB, ())
    executor = TorchExecutor(Decoder(config, weights, ops_for(CPU), positions=512), pool, sampler)
    core = EngineCore(CONFIG, (KVGroup("all", (0,), 1),), (PAGES,))
    ours, peer = socket.socketpair(socket.AF_UNIX)
    peer.settimeout(60)
    steps = 0

    def send(commands: Sequence[Command]) -> None:
        peer.sendall(b"".join(map(encode_frame, commands)))

    def hooked(call: Callable[[], None]) -> None:
        def computing() -> None:
            nonlocal steps
            steps += 1
            send(script.get(steps, ()))
            call()

        executor.when_computing(computing)

    if not overlap:
        hooked(lambda: None)
    log = io.BytesIO()
    opened = Opened(RECORD_VERSION, msgspec.msgpack.encode(CONFIG), (KVGroup("all", (0,), 1),), (PAGES,))
    log.write(encode_entry(opened))
    link = WorkerLink(ours)
    loop = WorkerLoop(
        core, executor, link, clock=WallClock(), recorder=Recorder(log),
        when_computing=hooked if overlap else None,
    )  # fmt: skip
    send(script[0])
    thread = threading.Thread(target=loop.run)
    thread.start()
    done = Run()
    frames: FrameDecoder[Event] = FrameDecoder(msgspec.msgpack.Decoder(Event))
    turns = sum(isinstance(command, Submit) for commands in script.values() for command in commands)
    while len(done.ended) < turns:
        for event in frames.feed(peer.recv(1 << 16)):
            assert isinstance(event, StepDone)
            for each in event.events:
                if isinstance(each, Token):
                    done.said.setdefault((each.session, each.turn), []).append(each.token)
                elif isinstance(each, TurnEnded):
                    done.ended[each.session, each.turn] = each
    send([Shutdown()])
    thread.join(60)
    assert not thread.is_alive()
    core.check()
    done.log = log.getvalue()
    peer.close()
    link.close()
    return done


def submit(name: str, prompt: Sequence[int], count: int, seed: int) -> Submit:
    sampling = Sampling(
        temperature=0.8 if seed % 2 else 0.0, seed=seed, max_tokens=count, repetition_penalty=1.1
    )
    return Submit(SessionId(name), TurnId(1), pack_tokens(array("i", prompt)), sampling)


def drawn(seed: int) -> Script:
    """Turns that share prefixes and come one after another; two are aborted, one is forked."""
    draw = random.Random(seed)
    shared = draw.choices(range(VOCAB), k=40)
    prompts = [
        shared[: draw.randint(0, 40)] + draw.choices(range(VOCAB), k=draw.randint(1, 50)) for _ in range(9)
    ]
    turns = [submit(f"s{n}", prompt, draw.randint(20, 40), n) for n, prompt in enumerate(prompts)]
    script: dict[int, list[Command]] = {0: list(turns[:2])}
    for turn in turns[2:]:
        script.setdefault(draw.randint(1, 24), []).append(turn)
    script.setdefault(9, []).insert(0, Abort(SessionId("s0"), TurnId(1)))
    script.setdefault(12, []).extend(
        [Fork(SessionId("s1"), SessionId("f"), 30), submit("f", prompts[1][:30], 9, 3)]
    )
    script.setdefault(14, []).append(Describe(1))
    return script


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_tokens(seed: int) -> None:
    script = drawn(seed)
    apart, over = (run(script, overlap=overlap) for overlap in (False, True))
    assert apart.ended.keys() == over.ended.keys()
    for turn, ended in apart.ended.items():
        one, other = apart.said.get(turn, []), over.said.get(turn, [])
        assert ended.reason is over.ended[turn].reason
        if ended.reason is FinishReason.ABORTED:
            shorter = min(len(one), len(other))
            one, other = one[:shorter], other[:shorter]
        assert one == other, turn
    assert sum(ended.usage.preemptions for ended in over.ended.values()) > 0
    for done in (apart, over):
        again = replay(decode_entries(done.log))
        assert again.plans > 40
        assert again.differs_at is None
    assert arrivals_in_steps(over.log) > 3
    assert arrivals_in_steps(apart.log) == 0


def arrivals_in_steps(log: bytes) -> int:
    """Commands that were applied between a plan and its result."""
    found, planned = 0, False
    for entry in decode_entries(log):
        match entry:
            case Planned(plan=plan):
                planned = bool(plan)
            case Finished():
                planned = False
            case Commanded():
                found += planned
    return found
