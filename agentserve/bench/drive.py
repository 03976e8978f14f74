"""One engine in this process, driven step by step and timed: core, executor and the bookkeeping between."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from agentserve.messages import Close, ResetPrefixCache, Submit, TurnEnded, pack_tokens
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.types import Sampling, SessionId, TurnId

Prompts = Sequence[Sequence[int]]


class Drive:
    """Its prefix cache is emptied before every run. ValueError where a prompt is too long for it."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built = built

    def prefill(self, prompts: Prompts) -> float:
        """Seconds until every prompt has its first token."""
        core = self._built.core
        began = time.perf_counter()
        names = self._submit(prompts, 1)
        while core.has_work:
            self._step()
        seconds = time.perf_counter() - began
        self._close(names)
        return seconds

    def decode(self, prompts: Prompts, steps: int) -> list[float]:
        """Seconds of each of `steps` steps that give every prompt one token."""
        # The first prompts are decoding while the last are prefilled; a step that is mixed is not timed.
        spare = sum(map(len, prompts))
        names = self._submit(prompts, steps + spare)
        seconds: list[float] = []
        while len(seconds) < steps:
            chunks, tokens, duration = self._step()
            if chunks == tokens == len(prompts):
                seconds.append(duration)
        self._close(names)
        return seconds

    def _submit(self, prompts: Prompts, tokens: int) -> list[SessionId]:
        core = self._built.core
        core.handle(ResetPrefixCache(0), 0.0)
        names = [SessionId(f"bench-{number}") for number in range(len(prompts))]
        room = self._built.hello.max_model_len - max(map(len, prompts))
        sampling = Sampling(temperature=0.0, max_tokens=max(1, min(tokens, room)), ignore_eos=True)
        for name, prompt in zip(names, prompts, strict=True):
            core.handle(Submit(name, TurnId(1), pack_tokens(array("i", prompt)), sampling), 0.0)
        return names

    def _step(self) -> tuple[int, int, float]:
        """One step: its chunks, its tokens, its seconds."""
        began = time.perf_counter()
        plan = self._built.core.begin_step(began)
        if plan is None:
            self._refused()
            raise ValueError("the KV pool is too small for what is measured: give more with --device-kv")
        self._built.core.finish_step(self._built.executor.run(plan), time.perf_counter())
        return len(plan.chunks), plan.tokens, time.perf_counter() - began

    def _close(self, names: Sequence[SessionId]) -> None:
        for name in names:
            self._built.core.handle(Close(name), 0.0)
        self._refused()

    def _refused(self) -> None:
        """Raise what the engine could not do, if anything."""
        for event in self._built.core.take_events():
            if isinstance(event, TurnEnded) and event.error:
                raise ValueError(event.error)
