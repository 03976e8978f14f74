"""A worker process with the real core, the proving executor, and a model that answers by a rule.

The executor compares all KV that a chunk reads with what its tokens produce. The rule is a function of
the prompt alone, so whoever knows a prompt knows the undisturbed answer. The pool is small: sessions
preempt each other and lose their cache all the time.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from array import array
from collections.abc import Sequence

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.core.plan import Chunk, Plan, StepResult
from agentserve.messages import PROTOCOL_VERSION, Hello, pack_tokens
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine, main
from agentserve.sim.executor import SimExecutor
from agentserve.types import KVGroup
from tests.fakes import END, EOS, START, ByteTokenizer

PAGES = 120
STEP_SECONDS = 0.002  # so that a stream lasts long enough to be hit by something


def answer(prompt: Sequence[int]) -> list[int]:
    """What the model says after a prompt of tests.fakes' template: a call of the first tool to a user's
    message if there are tools, else a text; the end token last."""
    words = hashlib.sha256(pack_tokens(array("i", prompt))).hexdigest()
    last = _split(prompt)[-2]
    if prompt[0] == ord("[") and bytes(last).startswith(b"user"):
        call = f'{{"name": "weather", "arguments": {{"city": "{words[:12]}"}}}}'
        text = f"{words[:5]}<tool_call>\n{call}\n</tool_call>"
    else:
        text = (words * 3)[: 20 + int(words[:2], 16) // 2]
    return [*text.encode(), END]


def _split(prompt: Sequence[int]) -> list[list[int]]:
    """The prompt's messages, without control tokens; the opening of the answer is the last."""
    parts: list[list[int]] = [[]]
    for token in prompt:
        if token == START:
            parts.append([])
        elif token < 256:
            parts[-1].append(token)
    return parts


class Executor(SimExecutor):
    def __init__(self, page_size: int) -> None:
        super().__init__((PAGES,), page_size, StepCost(), ByteTokenizer.vocab_size, self._next)
        self._answers: dict[tuple[str, int], list[int]] = {}

    def run(self, plan: Plan) -> StepResult:
        time.sleep(STEP_SECONDS)
        return super().run(plan)

    def _next(self, chunk: Chunk) -> int:
        spec, key = chunk.sample, (chunk.session, chunk.turn)
        assert spec is not None
        if key not in self._answers:
            if len(self._answers) > 1000:
                self._answers.clear()
            self._answers[key] = answer(spec.history[: spec.prompt])
        said = self._answers[key]
        done = spec.length - spec.prompt
        return said[done] if done < len(said) else EOS


def build(spec: WorkerSpec) -> BuiltEngine:
    config = CoreConfig(
        page_size=spec.page_size,
        max_model_len=1500,
        max_num_seqs=8,
        max_batched_tokens=128,
        eos_token_ids=(END, EOS),
    )
    groups, pages = (KVGroup("full", (0,), 1),), (PAGES,)
    core = EngineCore(config, groups, pages)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        pid=os.getpid(),
        backend="made-up",
        backend_reason="made up",
        device="cpu",
        dtype="none",
        weights="expanded",
        activations="float",
        kv_dtype="none",
        vocab_size=ByteTokenizer.vocab_size,
        max_model_len=core.limit,
        page_size=spec.page_size,
        pages=PAGES,
        kv_bytes=0,
        parameters=0,
        weight_bytes=0,
        weights_digest="ab" * 32,
        namespace="cd" * 32,
    )
    return BuiltEngine(core, Executor(spec.page_size), hello, config, groups, pages, StepCost())


if __name__ == "__main__":
    sys.exit(main(build))
