"""From logits to one token per row.

Order, as in vLLM: raw log-probabilities, logit bias, penalties, then what is forbidden (no end
before `min_tokens`, the grammar's mask), then greedy, or temperature, top-k, top-p, min-p and a
draw. Forbidding comes last so that nothing can lift it again; where the grammar leaves nothing
but an end, the grammar wins over `min_tokens`. Where reasoning has to end (`ReasoningCap`), only the
token that closes it is left, if the grammar has it.

A row is worked on alone, in numpy on one thread, so its token is the same whatever the batch.
Rows that need none of this on the host take the token that was found where the logits are (`picks.py`): the
decoder's best one, for comparing rounds nothing, or one that the backend drew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentserve.core.plan import Sampled, SampleSpec
from agentserve.executor.draws import uniform
from agentserve.executor.filters import draw
from agentserve.executor.folds import FoldCache, TurnFolds, needs_folds
from agentserve.executor.grammars import Grammars, GrammarStore, GrammarTooSlow
from agentserve.executor.logprobs import RawLogprobs
from agentserve.executor.not_sampled import NotSampled
from agentserve.executor.picks import Picks
from agentserve.types import Sampling, SessionId, TurnId
from kernels.ops import Drawing, Logits

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
        *,
        drawing: Drawing | None = None,
    ) -> None:
        """grammars: where matchers run; in this process by default. drawing: the backend's, if it has one."""
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._grammars = grammars or GrammarStore(token_bytes, vocab_size, self._eos)
        self._folds = FoldCache(max_sessions, token_bytes, self._grammars)
        self._picks = Picks(drawing)

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
        picked = self._picks(logits, [spec for _, _, spec in specs])
        results: list[Sampled | NotSampled | None] = [
            None if token is None or needs_folds(spec.sampling) else Sampled(token=token)
            for token, (_, _, spec) in zip(picked, specs, strict=True)
        ]
        others = [i for i in range(rows) if results[i] is None]
        if others:
            self._folds.expect(len(others))
            on_host = _rows(values, [i for i in others if picked[i] is None])
            for i in others:
                token = picked[i]
                results[i] = self._try_row(on_host[i] if token is None else token, *specs[i])
        return [result for result in results if result is not None]

    def _try_row(
        self, found: Row | int, session: SessionId, turn: TurnId, spec: SampleSpec
    ) -> Sampled | NotSampled:
        """found: a row of logits, or the token that was picked for it."""
        try:
            if isinstance(found, int):
                return self._follow(found, session, turn, spec)
            return self._sample_row(found, session, turn, spec)
        except GrammarTooSlow as error:
            return NotSampled(str(error), refused=True)
        except ValueError as error:
            return NotSampled(str(error))
        except Exception as error:  # of this row's settings or of a library: its batch mates go on
            log.exception("turn %d of session %s could not be sampled", turn, session)
            if isinstance(error, OSError):
                return NotSampled("the turn could not be sampled; the server's log says why")
            return NotSampled(f"{type(error).__name__}: {error}".splitlines()[0])

    def _follow(self, token: int, session: SessionId, turn: TurnId, spec: SampleSpec) -> Sampled:
        """What the turn's folds make of a picked token."""
        folds = self._folds.at(session, turn, spec)
        due = self._due(folds)
        token = token if due is None else due
        return Sampled(token=token, ended=folds.push(token))

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
        due = self._due(folds)
        if due is not None and (ids is None or due in ids):
            return np.array([due], dtype=np.int64)
        if spec.length - spec.prompt < spec.sampling.min_tokens:
            ends = self._ends(spec.sampling)
            if ids is not None:
                longer = ids[~np.isin(ids, ends)]
                ids = longer if len(longer) else ids
            elif len(ends) < len(row):
                row[ends[ends < len(row)]] = -np.inf
        return ids

    def _due(self, folds: TurnFolds | None) -> int | None:
        """The token that must come next, where the reasoning has to end."""
        due = folds.reasoning.due if folds is not None and folds.reasoning is not None else None
        return due if due is not None and due < self._vocab_size else None

    def _ends(self, sampling: Sampling) -> npt.NDArray[np.int64]:
        """The ids that would end a turn: stop tokens, and EOS unless it is to be ignored."""
        eos = () if sampling.ignore_eos else self._eos
        return np.array(sorted({*eos, *sampling.stop_token_ids}), dtype=np.int64)


def _rows(values: Tensor, wanted: Sequence[int]) -> dict[int, Row]:
    """These rows of `values`, by number: views of them where they are on the host, else copied together."""
    if not wanted:
        return {}
    if values.device.type == "cpu":
        return {i: values[i].detach().numpy() for i in wanted}
    return dict(zip(wanted, values[list(wanted)].cpu().numpy(), strict=True))
