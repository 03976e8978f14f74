"""Runs plans on a real model: copies, then chunks, then sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentserve.core.plan import Chunk, ChunkResult, PageCopy, Plan, Sampled, SampleSpec, StepResult
from agentserve.executor.batch import Piece, attention_shapes, build_batch, check_chunks, split_rows
from agentserve.executor.not_sampled import NotSampled
from agentserve.executor.pool import KVPool
from agentserve.executor.transfers import to_host
from agentserve.models.decoder import Decoder
from agentserve.types import SessionId, TurnId
from kernels.ops import Arrivals, GroupPages, Logits

MOST_ROWS = 512
"""Token rows of one pass: bounds activations; longer plans take several passes, with the same bits."""

_NOT_FINITE = "the model's output is not finite"

Row = tuple[SessionId, TurnId, SampleSpec]


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """What went through the model together, and which of its rows came out finite (on the device)."""

    pieces: Sequence[Piece]
    finite: Tensor  # [rows] bool


class SamplerPort(Protocol):
    """What the runner asks of sampling."""

    def sample(self, logits: Logits, specs: Sequence[Row]) -> Sequence[Sampled | NotSampled]:
        """One token, or why there is none, per row of `logits`, whose values may be overwritten."""
        ...

    def define_grammar(self, grammar_id: str, compiled: str) -> None: ...

    def drop_grammar(self, grammar_id: str) -> None: ...


class Restores(Arrivals, Protocol):
    """What comes into pages while steps run (`tiering.stores.device_copies`)."""

    def begin(self, pages: Callable[[], Sequence[NDArray[np.int32]]]) -> None:
        """A step begins that touches these pages of each KV group."""
        ...

    def end(self) -> None:
        """It is over, however it ended."""
        ...


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
        self._restores: Restores | None = None
        # On the CPU kernels leave Python's lock alone; a GPU's are only launched, which takes it.
        self._launches = decoder.device.type != "cpu"

    @property
    def decoder(self) -> Decoder:
        """The model that it runs."""
        return self._decoder

    def when_computing(self, call: Callable[[], None]) -> None:
        """Have `call` called in each run, when its model computes and Python has nothing to do: on the CPU
        before the first kernel, else when all of them are launched and only results are waited for. For
        what follows Python's lock is free, but for moments."""
        self._computing = call

    def expect(self, restores: Restores) -> None:
        """Have steps wait for these, and be told of, from the next one on."""
        self._restores = restores
        self._decoder.expect(restores)

    @torch.inference_mode()
    def prepare(self, rows: int) -> str:
        """Before the first plan: get ready for steps of up to `rows` sequences. One line that says how,
        "" where there is nothing to do. Writes nothing into pages."""
        shapes = attention_shapes(self._decoder.config, self._pool)
        pages = [GroupPages(*pair) for pair in zip(self._pool.storages, shapes, strict=True)]
        return self._decoder.prepare(pages, rows)

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
        if self._restores is None:
            return self._run(plan)
        try:
            self._restores.begin(lambda: _touched(plan, len(self._pool.groups)))
            if plan.copies and self._restores.expecting:
                self._restores.wait_all()
            return self._run(plan)
        finally:
            self._restores.end()

    def _run(self, plan: Plan) -> StepResult:
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
            ends, passes = self._forward([chunks[number] for number in runnable])
            sampled = self._sample(chunks, runnable, ends, passes, errors=errors, refused=refused)
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

    def _forward(self, chunks: Sequence[Chunk]) -> tuple[Tensor, list[_Pass]]:
        """The hidden state of each chunk's last token, `[chunks, hidden]`, and what was run for them."""
        ends: list[Tensor] = []
        passes: list[_Pass] = []
        for pieces in split_rows([len(chunk.tokens) for chunk in chunks], self._most_rows):
            batch = build_batch(pieces, chunks, self._decoder.config, self._pool, self._decoder.ops)
            if self._computing is not None and not (ends or self._launches):
                self._computing()
            hidden = self._decoder.forward(batch)
            last: list[int] = []
            row = 0
            for piece in pieces:
                row += piece.count
                if piece.offset + piece.count == len(chunks[piece.chunk].tokens):
                    last.append(row - 1)
            passes.append(_Pass(pieces, hidden.finite))
            ends.append(_rows(hidden.rows, last))
        return ends[0] if len(ends) == 1 else torch.cat(ends), passes

    def _sample(
        self,
        chunks: Sequence[Chunk],
        runnable: Sequence[int],
        ends: Tensor,
        passes: Sequence[_Pass],
        *,
        errors: list[str],
        refused: set[int],
    ) -> dict[int, Sampled]:
        """Sampled tokens by chunk number; a row that gives none becomes an error instead, and is `refused`
        where its request is at fault.

        `ends` are the hidden states of the `runnable` chunks. Nothing is read back from the device before
        the logits are under way: then all that is small comes in one copy.
        """
        places = [place for place, number in enumerate(runnable) if chunks[number].sample]
        logits = self._decoder.logits(_rows(ends, places)) if places else None
        if self._computing is not None and self._launches:
            self._computing()
        fetched = to_host([done.finite for done in passes] + ([logits.finite, logits.best] if logits else []))
        for done, finite in zip(passes, fetched, strict=False):
            for place in _broken(done.pieces, finite.tolist()):
                errors[runnable[place]] = _NOT_FINITE
        if logits is None:
            return {}
        logits = Logits(logits.values, fetched[-1], fetched[-2])
        numbers = [runnable[place] for place in places]
        for number, good in zip(numbers, logits.finite.tolist(), strict=True):
            if not good:
                errors[number] = _NOT_FINITE
        good_rows = [row for row, number in enumerate(numbers) if not errors[number]]
        if not good_rows:
            return {}
        if len(good_rows) < len(numbers):
            logits, numbers = logits.take(good_rows), [numbers[row] for row in good_rows]
        return self._drawn(chunks, numbers, logits, errors, refused)

    def _drawn(
        self,
        chunks: Sequence[Chunk],
        numbers: Sequence[int],
        logits: Logits,
        errors: list[str],
        refused: set[int],
    ) -> dict[int, Sampled]:
        """As `_sample`, of the chunks `numbers`, whose logits are all finite."""
        specs = [_row(chunks[number]) for number in numbers]
        sampled: dict[int, Sampled] = {}
        for number, found in zip(numbers, self._sampler.sample(logits, specs), strict=True):
            if isinstance(found, NotSampled):
                errors[number] = found.error
                if found.refused:
                    refused.add(number)
            else:
                sampled[number] = found
        return sampled


def _touched(plan: Plan, groups: int) -> list[NDArray[np.int32]]:
    """The pages of each KV group that a plan reads or writes. What is wrong in it is found later."""
    copied = [
        np.array([page for copy in plan.copies if copy.group == group for page in (copy.source, copy.target)])
        for group in range(groups)
    ]
    tables = [
        [np.asarray(chunk.tables[group]) for chunk in plan.chunks if group < len(chunk.tables)]
        for group in range(groups)
    ]
    return [
        np.concatenate([some, *others]).astype(np.int32) for some, others in zip(copied, tables, strict=True)
    ]


def _row(chunk: Chunk) -> Row:
    assert chunk.sample is not None
    return chunk.session, chunk.turn, chunk.sample


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """`tensor[rows]` for ascending `rows`: itself if that is all of them, as in every step of decoding."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]


def _broken(pieces: Sequence[Piece], finite: Sequence[bool]) -> set[int]:
    """The chunks of a pass that have a row which is not finite."""
    broken: set[int] = set()
    if all(finite):
        return broken
    row = 0
    for piece in pieces:
        if not all(finite[row : row + piece.count]):
            broken.add(piece.chunk)
        row += piece.count
    return broken
