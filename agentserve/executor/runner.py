"""Runs plans on a real model: copies, then chunks, then sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentserve.core.plan import Chunk, ChunkResult, PageCopy, Plan, Sampled, SampleSpec, StepResult
from agentserve.executor.batch import Piece, build_batch, check_chunks, split_rows
from agentserve.executor.not_sampled import NotSampled
from agentserve.executor.pool import KVPool
from agentserve.models.decoder import Decoder
from agentserve.types import SessionId, TurnId
from kernels.ops import Logits

MOST_ROWS = 512
"""Token rows of one pass: bounds activations; longer plans take several passes, with the same bits."""

_NOT_FINITE = "the model's output is not finite"

Row = tuple[SessionId, TurnId, SampleSpec]


class SamplerPort(Protocol):
    """What the runner asks of sampling."""

    def sample(self, logits: Logits, specs: Sequence[Row]) -> Sequence[Sampled | NotSampled]:
        """One token, or why there is none, per row of `logits`, whose values may be overwritten."""
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
        self._computing: Callable[[], None] | None = None

    @property
    def decoder(self) -> Decoder:
        """The model that it runs."""
        return self._decoder

    def when_computing(self, call: Callable[[], None]) -> None:
        """Have `call` called in each run, before the first kernel of its model: for what follows Python's
        lock is free, but for moments."""
        self._computing = call

    @property
    def pool(self) -> KVPool:
        """The pages that it reads and writes; whoever else touches them keeps to the core's pins."""
        return self._pool

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
        errors = check_chunks(chunks, self._decoder.config, self._pool, self._decoder.positions)
        computed = [0 if error else len(chunk.tokens) for chunk, error in zip(chunks, errors, strict=True)]
        runnable = [number for number, error in enumerate(errors) if not error]
        sampled: dict[int, Sampled] = {}
        refused: set[int] = set()
        if runnable:
            ends, broken = self._forward([chunks[number] for number in runnable])
            for place in broken:
                errors[runnable[place]] = _NOT_FINITE
            sampled = self._sample(chunks, runnable, ends, errors, refused)
        results = tuple(
            ChunkResult(
                session=chunk.session,
                turn=chunk.turn,
                epoch=chunk.epoch,
                computed=computed[number],
                sampled=sampled.get(number),
                error=errors[number],
                refused=number in refused,
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

    def _forward(self, chunks: Sequence[Chunk]) -> tuple[Tensor, set[int]]:
        """The hidden state of each chunk's last token, `[chunks, hidden]`, and which chunks have a row
        that is not finite."""
        ends: list[Tensor] = []
        broken: set[int] = set()
        for pieces in split_rows([len(chunk.tokens) for chunk in chunks], self._most_rows):
            batch = build_batch(pieces, chunks, self._decoder.config, self._pool, self._decoder.ops)
            if self._computing is not None and not ends:
                self._computing()
            hidden = self._decoder.forward(batch)
            finite = hidden.finite.tolist()
            last: list[int] = []
            row = 0
            for piece in pieces:
                row += piece.count
                if piece.offset + piece.count == len(chunks[piece.chunk].tokens):
                    last.append(row - 1)
            if not all(finite):
                broken |= _broken(pieces, finite)
            ends.append(_rows(hidden.rows, last))
        return ends[0] if len(ends) == 1 else torch.cat(ends), broken

    def _sample(
        self,
        chunks: Sequence[Chunk],
        runnable: Sequence[int],
        ends: Tensor,
        errors: list[str],
        refused: set[int],
    ) -> dict[int, Sampled]:
        """Sampled tokens by chunk number; a row that gives none becomes an error instead, and is `refused`
        where its request is at fault.

        `ends` are the hidden states of the `runnable` chunks. Of which rows there are logits follows from
        the plan alone, so that ranks that compute together (`Ranks`) need not agree on it; those of chunks
        with an error are not sampled.
        """
        places, numbers, specs = [], [], []
        for place, number in enumerate(runnable):
            chunk = chunks[number]
            if chunk.sample:
                places.append(place)
                numbers.append(number)
                specs.append((chunk.session, chunk.turn, chunk.sample))
        if not places:
            return {}
        logits = self._decoder.logits(_rows(ends, places))
        finite = logits.finite.tolist()
        for number, whole in zip(numbers, finite, strict=True):
            if not whole:
                errors[number] = _NOT_FINITE
        good_rows = [row for row, number in enumerate(numbers) if not errors[number]]
        if not good_rows:
            return {}
        if len(good_rows) < len(numbers):
            logits = logits.take(good_rows)
            numbers, specs = [numbers[row] for row in good_rows], [specs[row] for row in good_rows]
        sampled: dict[int, Sampled] = {}
        for number, found in zip(numbers, self._sampler.sample(logits, specs), strict=True):
            if isinstance(found, NotSampled):
                errors[number] = found.error
                if found.refused:
                    refused.add(number)
            else:
                sampled[number] = found
        return sampled


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """`tensor[rows]` for ascending `rows`: itself if that is all of them, as in every step of decoding."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]


def _broken(pieces: Sequence[Piece], finite: Sequence[bool]) -> set[int]:
    """The chunks of a pass that have a row which is not finite."""
    broken: set[int] = set()
    row = 0
    for piece in pieces:
        if not all(finite[row : row + piece.count]):
            broken.add(piece.chunk)
        row += piece.count
    return broken
