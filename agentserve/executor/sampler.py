"""From logits to one token per row.

Order, as in vLLM: raw log-probabilities, logit bias, penalties, then what is forbidden (no end
before `min_tokens`, the grammar's mask), then greedy, or temperature, top-k, top-p, min-p and a
draw. Forbidding comes last so that nothing can lift it again; where the grammar leaves nothing
but an end, the grammar wins over `min_tokens`. Where reasoning has to end (`ReasoningCap`), only the
token that closes it is left, if the grammar has it.

A row is worked on alone, in numpy on one thread, so its token is the same whatever the batch.
Plain greedy rows take what the decoder found to be best: comparing rounds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentserve.core.plan import Sampled, SampleSpec
from agentserve.executor.draws import uniform
from agentserve.executor.filters import draw
from agentserve.executor.folds import FoldCache, TurnFolds, needs_folds
from agentserve.executor.grammars import Grammars, GrammarStore, GrammarTooSlow
from agentserve.executor.logprobs import RawLogprobs
from agentserve.executor.not_sampled import NotSampled
from agentserve.types import Sampling, SessionId, TurnId
from kernels.ops import Logits

log = logging.getLogger(__name__)

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
        grammars: Grammars | None = None,
    ) -> None:
        """grammars: where matchers run; in this process by default."""
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._grammars = grammars or GrammarStore(token_bytes, vocab_size, self._eos)
        self._folds = FoldCache(max_sessions, token_bytes, self._grammars)

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        """Make a grammar known (text from `tools_bridge.grammar`); an unusable one is a ValueError."""
        self._grammars.define(grammar_id, compiled)

    def drop_grammar(self, grammar_id: str) -> None:
        self._grammars.drop(grammar_id)

    def sample(self, logits: Logits, specs: Sequence[Request]) -> list[Sampled | NotSampled]:
        """One token per row of `logits` (all finite, any device; their values may be overwritten).

        `Sampled.ended` is set when the token completes a stop string (from `min_tokens` on), when
        it completes a grammar after which only an end-of-sequence token could follow (so none is
        asked for), or when it is that token. A row that cannot be sampled (an unknown grammar,
        tokens outside it, penalties that leave float32) fails alone.
        """
        values = logits.values
        rows, width = values.shape
        if rows != len(specs) or width != self._vocab_size:
            raise ValueError(
                f"logits of shape {rows}x{width} for {len(specs)} rows and a vocabulary of {self._vocab_size}"
            )
        results: list[Sampled | NotSampled | None] = [
            Sampled(token=best) if self._is_plain(spec) else None
            for best, (_, _, spec) in zip(logits.best.tolist(), specs, strict=True)
        ]
        others = [i for i in range(rows) if results[i] is None]
        if others:
            self._folds.expect(len(others))
            on_cpu = values.detach() if values.device.type == "cpu" else values[others].cpu()
            for n, i in enumerate(others):
                row: Row = on_cpu[i if values.device.type == "cpu" else n].numpy()
                results[i] = self._try_row(row, *specs[i])
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

    def _try_row(self, row: Row, session: SessionId, turn: TurnId, spec: SampleSpec) -> Sampled | NotSampled:
        try:
            return self._sample_row(row, session, turn, spec)
        except GrammarTooSlow as error:
            return NotSampled(str(error), refused=True)
        except ValueError as error:
            return NotSampled(str(error))
        except Exception as error:  # of this row's settings or of a library: its batch mates go on
            log.exception("turn %d of session %s could not be sampled", turn, session)
            if isinstance(error, OSError):
                return NotSampled("the turn could not be sampled; the server's log says why")
            return NotSampled(f"{type(error).__name__}: {error}".splitlines()[0])

    def _sample_row(self, row: Row, session: SessionId, turn: TurnId, spec: SampleSpec) -> Sampled:
        sampling = spec.sampling
        folds = self._folds.at(session, turn, spec) if needs_folds(sampling) else None
        raw = RawLogprobs(row, sampling.logprobs) if sampling.logprobs is not None else None
        with np.errstate(over="ignore", invalid="ignore"):  # told below, of the tokens that count
            self._shift(row, sampling, folds)
        ids = self._candidates(row, spec, folds)
        values = row if ids is None else row[ids]
        if not float(values.max()) < np.inf:  # NaN, too, fails this
            raise ValueError("the penalties and biases asked for leave no finite logits")
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
            if folds.grammar.over or len(ids) == 0:
                raise ValueError(f"grammar {spec.sampling.grammar!r} is already complete")
        due = folds.reasoning.due if folds is not None and folds.reasoning is not None else None
        if due is not None and due < len(row) and (ids is None or due in ids):
            return np.array([due], dtype=np.int64)
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
