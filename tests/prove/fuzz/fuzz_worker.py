"""The real worker, whose model also says what it is told to say: a prompt whose last message begins with
`SAY:` is answered with the rest of that message. So a test chooses a model's every word."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from agentserve.core.plan import Chunk, ChunkResult, Plan, StepResult
from agentserve.models.source import resolve
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine, main
from agentserve.text import TextModel, load

ORDER, END = "SAY:", "<|im_end|>"


class Parrot:
    """An executor that runs everything, and then says what was ordered."""

    def __init__(self, executor: Any, text: TextModel) -> None:
        self._executor = executor
        self._text = text
        self._end = text.tokenizer.control[END]
        self._orders: dict[tuple[str, int], list[int] | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def run(self, plan: Plan) -> StepResult:
        done: StepResult = self._executor.run(plan)
        results = [self._said(chunk, result) for chunk, result in zip(plan.chunks, done.chunks, strict=True)]
        return structs.replace(done, chunks=tuple(results))

    def _said(self, chunk: Chunk, result: ChunkResult) -> ChunkResult:
        spec = chunk.sample
        if spec is None or result.sampled is None or result.error or spec.sampling.grammar is not None:
            return result
        key = (chunk.session, chunk.turn)
        if key not in self._orders:
            if len(self._orders) > 500:
                self._orders.clear()
            self._orders[key] = self._order(list(spec.history[: spec.prompt]))
        words = self._orders[key]
        if words is None:
            return result
        at = spec.length - spec.prompt
        return structs.replace(
            result,
            sampled=structs.replace(
                result.sampled, token=words[at] if at < len(words) else self._end, ended=False
            ),
        )

    def _order(self, prompt: list[int]) -> list[int] | None:
        ends = [place for place, token in enumerate(prompt) if token == self._end]
        begin = ends[-2] + 1 if len(ends) > 1 else 0
        last = self._text.tokenizer.decode(prompt[begin : ends[-1]], skip_control=False) if ends else ""
        _, order, words = last.partition(ORDER)
        return self._text.tokenizer.encode(words) if order else None


def build(spec: WorkerSpec) -> BuiltEngine:
    built = build_engine(spec)
    chat_template = Path(spec.chat_template) if spec.chat_template else None
    text = load(resolve(spec.model).path, chat_template, spec.tool_parser, spec.reasoning_parser)
    return replace(built, executor=Parrot(built.executor, text))


if __name__ == "__main__":
    sys.exit(main(build))
