"""Runs plans on a real model: copies, then chunks, then sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentserve.core.plan import Chunk, ChunkResult, PageCopy, Plan, Sampled, SampleSpec, StepResult
from agentserve.executor.batch import build_batch, check_chunk, split_rows
from agentserve.executor.pool import KVPool
from agentserve.executor.sampler import NotSampled
from agentserve.models.decoder import Decoder
from agentserve.types import SessionId, TurnId

MOST_ROWS = 512
"""Token rows of one pass: bounds activations; longer plans take several passes, with the same bits."""

_NOT_FINITE = "the model's output is not finite"

Row = tuple[SessionId, TurnId, SampleSpec]


class SamplerPort(Protocol):
    """What the runner asks of sampling."""

    def sample(self, logits: Tensor, specs: Sequence[Row]) -> Sequence[Sampled | NotSampled]:
        """One token, or why there is none, per row of `logits [rows, vocab]` float32, which may be
        overwritten."""
        ...

    def define_grammar(self, grammar_id: str, compiled: str) -> None: ...

    def drop_grammar(self, grammar_id: str) -> None: ...


class TorchExecutor:
    """`agentserve.core.ports.Executor` over a decoder and its KV pool, on one device."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, sampler: SamplerPort, most_rows: int = MOST_ROWS
    ) -> None:
        if most_rows < 1:
            raise ValueError(f"most_rows must be at least 1, is {most_rows}")
        if pool.dtype not in decoder.ops.kv_dtypes(decoder.dtype):
            raise ValueError(
                f"{decoder.ops.name} kernels cannot keep KV in {pool.dtype} for a model in {decoder.dtype}"
            )
        self._decoder = decoder
        self._pool = pool
        self._sampler = sampler
        self._most_rows = most_rows

    @property
    def decoder(self) -> Decoder:
        """The model that it runs."""
        return self._decoder

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        self._sampler.define_grammar(grammar_id, compiled)

    def drop_grammar(self, grammar_id: str) -> None:
        self._sampler.drop_grammar(grammar_id)

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Run one plan; blocks until its tokens are sampled.

        A chunk that does not fit the model or the pool, or whose output is not finite, is reported
        in its `ChunkResult.error`; the other chunks of the step are not touched by it.
        """
        began = time.perf_counter()
        for copy in plan.copies:
            self._copy(copy)
        chunks = plan.chunks
        config, positions = self._decoder.config, self._decoder.positions
        errors = [check_chunk(chunk, config, self._pool, positions) for chunk in chunks]
        runnable = [number for number, error in enumerate(errors) if not error]
        last_rows = self._forward([chunks[number] for number in runnable])
        for number, row in zip(runnable, last_rows, strict=True):
            if row is None:
                errors[number] = _NOT_FINITE
        alive = {number: row for number, row in zip(runnable, last_rows, strict=True) if row is not None}
        sampled = self._sample(chunks, alive, errors)
        ran = set(runnable)
        results = tuple(
            ChunkResult(
                session=chunk.session,
                turn=chunk.turn,
                epoch=chunk.epoch,
                computed=len(chunk.tokens) if number in ran else 0,
                sampled=sampled.get(number),
                error=errors[number],
            )
            for number, chunk in enumerate(chunks)
        )
        return StepResult(plan.step, results, time.perf_counter() - began)

    def _copy(self, copy: PageCopy) -> None:
        pool = self._pool
        if not 0 <= copy.group < len(pool.groups):
            raise ValueError(f"page copy names KV group {copy.group} of {len(pool.groups)}")
        pages = pool.pages[copy.group]
        inside = 0 <= copy.source < pages and 0 <= copy.target < pages and 0 <= copy.slots <= pool.page_size
        if not inside:
            raise ValueError(f"page copy {copy} leaves the pool of {pages} pages of {pool.page_size} slots")
        self._decoder.ops.copy_page(pool.storages[copy.group], copy.source, copy.target, copy.slots)

    def _forward(self, chunks: Sequence[Chunk]) -> list[Tensor | None]:
        """The hidden state `[hidden]` of each chunk's last token; None if any of its rows is not finite."""
        last: list[Tensor | None] = [None] * len(chunks)
        broken: set[int] = set()
        for pieces in split_rows([len(chunk.tokens) for chunk in chunks], self._most_rows):
            batch = build_batch(pieces, chunks, self._decoder.config, self._pool, self._decoder.ops)
            hidden = self._decoder.forward(batch)
            finite = hidden.isfinite().all(dim=-1).tolist()
            row = 0
            for piece in pieces:
                if not all(finite[row : row + piece.count]):
                    broken.add(piece.chunk)
                row += piece.count
                last[piece.chunk] = hidden[row - 1].clone()
        return [None if number in broken else row for number, row in enumerate(last)]

    def _sample(
        self, chunks: Sequence[Chunk], alive: dict[int, Tensor], errors: list[str]
    ) -> dict[int, Sampled]:
        """Sampled tokens by chunk number; a row that gives none becomes an error instead."""
        wanted = [
            (number, spec)
            for number, chunk in enumerate(chunks)
            if (spec := chunk.sample) and number in alive
        ]
        if not wanted:
            return {}
        logits = self._decoder.logits(torch.stack([alive[number] for number, _ in wanted]))
        finite = logits.isfinite().all(dim=-1).tolist()
        if not all(finite):
            for (number, _), good in zip(wanted, finite, strict=True):
                errors[number] = "" if good else _NOT_FINITE
            wanted = [item for item, good in zip(wanted, finite, strict=True) if good]
            logits = logits[torch.tensor(finite, device=logits.device)]
        if not wanted:
            return {}
        specs = [(chunks[number].session, chunks[number].turn, spec) for number, spec in wanted]
        sampled: dict[int, Sampled] = {}
        for (number, _), found in zip(wanted, self._sampler.sample(logits, specs), strict=True):
            if isinstance(found, NotSampled):
                errors[number] = found.error
            else:
                sampled[number] = found
        return sampled
