"""A worker process with a tiny made-up model: every token is a function of all tokens before it.

Everything around the model is the real thing: process, socket, frames, loop. A session whose
name starts with `crash<k>-` kills its worker (SIGKILL) when it samples its k-th token, once per
file named in argv[1]; `poison-` does so always; `slow-` takes 20 ms per token. argv[2], when
given, is an error with which the engine cannot be built (`sleep`: it is never ready; `abort`: it
crashes as long as the state of its KV on disk is not the one that says it is not to be trusted).
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import time
from pathlib import Path

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.plan import Chunk, ChunkResult, Plan, Sampled, SampleSpec, StepResult
from agentserve.messages import (
    PROTOCOL_VERSION,
    Abort,
    Close,
    Command,
    Describe,
    Description,
    Hello,
    ResetPrefixCache,
    SessionView,
    StateChange,
    Submit,
    Token,
    TurnEnded,
    TurnUsage,
    WorkerView,
    unpack_tokens,
)
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine, main
from agentserve.types import FinishReason, KVGroup, SessionState
from tiering.stores.environment import worker_folder


def next_token(history) -> int:
    digest = hashlib.sha256(",".join(map(str, history)).encode()).digest()
    return int.from_bytes(digest[:2], "big")


def reference(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed turn generates."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class FakeCore:
    """One step runs every turn by one token."""

    def __init__(self) -> None:
        self._turns: dict[tuple, Submit] = {}
        self._histories: dict[tuple, object] = {}
        self._made: dict[tuple, int] = {}
        self._events: list = []
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._turns)

    def handle(self, command: Command, now: float) -> None:
        match command:
            case Submit():
                key = command.session, command.turn
                self._turns[key] = command
                self._histories[key] = unpack_tokens(command.tokens)
                self._made[key] = command.generated
                self._events.append(StateChange(*key, SessionState.WAITING, now))
            case Abort(session=session, turn=turn):
                self._finish((session, turn), FinishReason.ABORTED, now)
            case Close(session=session):
                for key in [key for key in self._turns if key[0] == session]:
                    self._finish(key, FinishReason.ABORTED, now)
            case Describe(request=request, session=session):
                view = None
                if session is not None:
                    view = SessionView(session, SessionState.IDLE, 1, 1, 1, 1, 0)
                self._events.append(Description(request, self.view(), view))
            case ResetPrefixCache(request=request):
                self._events.append(Description(request, self.view()))

    def begin_step(self, now: float) -> Plan | None:
        if not self._turns:
            return None
        chunks = []
        for (session, turn), submit in self._turns.items():
            history = self._histories[session, turn]
            prompt = len(submit.tokens) // 4 - submit.generated
            spec = SampleSpec(submit.sampling, history, prompt, len(history))
            chunks.append(Chunk(session, turn, 0, len(history) - 1, history[-1:], (), spec))
        self._steps += 1
        return Plan(self._steps, (), tuple(chunks), 0.0, ())

    def finish_step(self, result: StepResult, now: float) -> None:
        for chunk in result.chunks:
            key = chunk.session, chunk.turn
            self._histories[key].append(chunk.sampled.token)
            self._events.append(Token(*key, self._made[key], chunk.sampled.token))
            self._made[key] += 1
            if self._made[key] >= self._turns[key].sampling.max_tokens:
                self._finish(key, FinishReason.LENGTH, now)

    def fail_step(self, plan: Plan, error: str, now: float) -> None:
        for chunk in plan.chunks:
            self._finish((chunk.session, chunk.turn), FinishReason.ERROR, now, error)

    def _finish(self, key, reason: FinishReason, now: float, error: str = "") -> None:
        submit = self._turns.pop(key, None)
        if submit is None:
            return
        prompt = len(submit.tokens) // 4
        usage = TurnUsage(prompt, 0, self._made[key], prompt, 0, now, now, now, now)
        self._events.append(TurnEnded(*key, reason, usage, error))

    def take_events(self) -> list:
        events, self._events = self._events, []
        return events

    def view(self) -> WorkerView:
        running = len(self._turns)
        return WorkerView(running, 0, running, 10, 10, 0, 0)


class FakeExecutor:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def run(self, plan: Plan) -> StepResult:
        results = []
        for chunk in plan.chunks:
            self._misbehave(chunk)
            token = next_token(chunk.sample.history)
            results.append(ChunkResult(chunk.session, chunk.turn, chunk.epoch, 1, Sampled(token)))
        return StepResult(plan.step, tuple(results), 0.0)

    def _misbehave(self, chunk: Chunk) -> None:
        spec = chunk.sample
        if chunk.session.startswith("slow-"):
            time.sleep(0.02)
        if chunk.session.startswith("raises-"):
            raise RuntimeError("the made-up kernel failed\nsecond line")
        if chunk.session.startswith("poison-"):
            os.kill(os.getpid(), signal.SIGKILL)
        crash = re.match(r"crash(\d+)-", chunk.session)
        if crash and spec.length - spec.prompt == int(crash[1]) and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        if compiled == "bad":
            raise ValueError("not a grammar")

    def drop_grammar(self, grammar_id: str) -> None:
        pass


def build(spec: WorkerSpec) -> BuiltEngine:
    if sys.argv[2:] == ["sleep"]:
        time.sleep(3600)
    if sys.argv[2:] == ["abort"]:
        state = worker_folder(Path(spec.data_dir), spec.index) / "state"
        state.parent.mkdir(parents=True, exist_ok=True)
        if not state.exists() or state.read_text().split() != ["unsure"]:
            os.abort()
    elif len(sys.argv) > 2:
        raise ValueError(sys.argv[2])
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        backend="made-up",
        backend_reason="made up",
        device=spec.device,
        dtype=spec.dtype,
        weights="expanded",
        activations="float",
        kv_dtype=spec.dtype,
        vocab_size=65536,
        max_model_len=4096,
        page_size=spec.page_size,
        pages=10,
        kv_bytes=10,
        parameters=0,
        weight_bytes=0,
        weights_digest="",
        namespace="",
    )
    groups = (KVGroup("full", (0,), 1),)
    return BuiltEngine(
        FakeCore(), FakeExecutor(Path(sys.argv[1])), hello, CoreConfig(), groups, (10,), StepCost()
    )


if __name__ == "__main__":
    sys.exit(main(build))
