"""From logits to one token per row.

Order, as in vLLM: raw log-probabilities, logit bias, penalties, then what is forbidden (no end
before `min_tokens`, the grammar's mask), then greedy, or temperature, top-k, top-p, min-p and a
draw. Forbidding comes last so that nothing can lift it again; where the grammar leaves nothing
but an end, the grammar wins over `min_tokens`.

A row is worked on alone, in numpy on one thread, so its token is the same whatever the batch.
Only the argmax of plain greedy rows runs over the batch: comparing rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentserve.core.plan import Sampled, SampleSpec
from agentserve.executor.draws import uniform
from agentserve.executor.filters import draw
from agentserve.executor.folds import FoldCache, TurnFolds, needs_folds
from agentserve.executor.grammars import GrammarStore
from agentserve.executor.logprobs import RawLogprobs
from agentserve.types import Sampling, SessionId, TurnId

Row = npt.NDArray[np.float32]
Request = tuple[SessionId, TurnId, SampleSpec]


class Sampler:
    """Samples for one worker. Not thread-safe: one thread runs steps.

    `token_bytes[i]` is what token `i` adds to the text the client sees, b"" where that is nothing
    (control tokens): stop strings and grammars are about that text. It may be shorter than
    `vocab_size`, the width of the logits. `max_sessions` bounds how many turns' folds are kept;
    fewer than run at once costs time, never correctness.
    """

    def __init__(
        self,
        vocab_size: int,
        token_bytes: Sequence[bytes],
        eos_token_ids: Sequence[int],
        max_sessions: int = 1024,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._grammars = GrammarStore(token_bytes, vocab_size, self._eos)
        self._folds = FoldCache(max_sessions, token_bytes, self._grammars)

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        """Make a grammar known (text from `tools_bridge.grammar`); an unusable one is a ValueError."""
        self._grammars.define(grammar_id, compiled)

    def drop_grammar(self, grammar_id: str) -> None:
        self._grammars.drop(grammar_id)

    def problem(self, session: SessionId, turn: TurnId, spec: SampleSpec) -> str:
        """Why `sample` would fail on this row (an unknown grammar, tokens outside it), or ""."""
        if not needs_folds(spec.sampling):
            return ""
        try:
            folds = self._folds.at(session, turn, spec)
        except ValueError as error:
            return str(error)
        if folds.grammar is not None and folds.grammar.over:
            return f"grammar {spec.sampling.grammar!r} is already complete"
        return ""

    def sample(self, logits: torch.Tensor, specs: Sequence[Request]) -> list[Sampled]:
        """One token per row of `logits` (fp32 [rows, vocab], any device; may be overwritten).

        `Sampled.ended` is set when the token completes a stop string (from `min_tokens` on), when
        it completes a grammar after which only an end-of-sequence token could follow (so none is
        asked for), or when it is that token. A row for which `problem` is not empty is a
        ValueError.
        """
        rows, width = logits.shape
        if rows != len(specs) or width != self._vocab_size:
            raise ValueError(
                f"logits of shape {rows}x{width} for {len(specs)} rows and a vocabulary of {self._vocab_size}"
            )
        logits = logits.detach()
        results: list[Sampled | None] = [None] * rows
        plain = [i for i, (_, _, spec) in enumerate(specs) if self._is_plain(spec)]
        if plain:
            chosen = logits if len(plain) == rows else logits[plain]
            for i, token in zip(plain, chosen.argmax(dim=-1).tolist(), strict=True):
                results[i] = Sampled(token=token)
        others = [i for i in range(rows) if results[i] is None]
        if others:
            on_cpu = logits if logits.device.type == "cpu" else logits[others].cpu()
            for n, i in enumerate(others):
                row: Row = on_cpu[i if on_cpu is logits else n].numpy()
                results[i] = self._sample_row(row, *specs[i])
        return [result for result in results if result is not None]

    def _is_plain(self, spec: SampleSpec) -> bool:
        sampling = spec.sampling
        return (
            sampling.temperature == 0.0
            and sampling.logprobs is None
            and not sampling.logit_bias
            and not needs_folds(sampling)
            and spec.length - spec.prompt >= sampling.min_tokens
        )

    def _sample_row(self, row: Row, session: SessionId, turn: TurnId, spec: SampleSpec) -> Sampled:
        sampling = spec.sampling
        folds = self._folds.at(session, turn, spec) if needs_folds(sampling) else None
        raw = RawLogprobs(row, sampling.logprobs) if sampling.logprobs is not None else None
        self._shift(row, sampling, folds)
        ids = self._candidates(row, spec, folds)
        values = row if ids is None else row[ids]
        if sampling.temperature == 0.0:
            index = int(values.argmax())
        else:
            index = draw(values, sampling, uniform(sampling.seed, spec.length))
        token = index if ids is None else int(ids[index])
        return Sampled(
            token=token,
            logprob=None if raw is None else raw.of(token),
            top=() if raw is None else raw.top(),
            ended=folds is not None and folds.push(token),
        )

    @staticmethod
    def _shift(row: Row, sampling: Sampling, folds: TurnFolds | None) -> None:
        for token, bias in sampling.logit_bias.items():
            if 0 <= token < len(row):
                row[token] += np.float32(bias)
        if folds is not None and folds.counts is not None:
            folds.counts.apply(row, sampling)

    def _candidates(
        self, row: Row, spec: SampleSpec, folds: TurnFolds | None
    ) -> npt.NDArray[np.int64] | None:
        """Ids of the tokens that may be chosen, ascending; None where all may."""
        ids: npt.NDArray[np.int64] | None = None
        if folds is not None and folds.grammar is not None:
            ids = folds.grammar.allowed()
            if len(ids) == 0:
                raise ValueError(f"grammar {spec.sampling.grammar!r} is already complete")
        if spec.length - spec.prompt < spec.sampling.min_tokens:
            ends = self._ends(spec.sampling)
            if ids is not None:
                longer = ids[~np.isin(ids, ends)]
                ids = longer if len(longer) else ids
            elif len(ends) < len(row):
                row[ends[ends < len(row)]] = -np.inf
        return ids

    def _ends(self, sampling: Sampling) -> npt.NDArray[np.int64]:
        """The ids that would end a turn: stop tokens, and EOS unless it is to be ignored."""
        eos = () if sampling.ignore_eos else self._eos
        return np.array(sorted({*eos, *sampling.stop_token_ids}), dtype=np.int64)
