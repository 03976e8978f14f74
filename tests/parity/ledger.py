"""Rows of logits by the tokens before them: whatever path leads to a prefix, its row has the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentserve.core.plan import Sampled, SampleSpec
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import SamplerPort, TorchExecutor
from agentserve.executor.sampler import NotSampled
from agentserve.models.decoder import Decoder
from agentserve.types import SessionId, TurnId
from kernels.ops import Logits
from tests.engines import Rig


@dataclass
class Ledger:
    """Files each row of logits under its prefix, refuses a second opinion, and says what `sampler` says:
    the best token where there is none."""

    rows: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    repeats: int = 0
    sampler: SamplerPort | None = None

    def sample(
        self, logits: Logits, specs: Sequence[tuple[SessionId, TurnId, SampleSpec]]
    ) -> Sequence[Sampled | NotSampled]:
        for row, (session, _, spec) in zip(logits.values, specs, strict=True):
            prefix = tuple(spec.history[: spec.length])
            known = self.rows.setdefault(prefix, row.clone())
            self.repeats += known is not row
            assert torch.equal(known, row), f"{session}: other bits at position {spec.length}"
        if self.sampler is not None:
            return self.sampler.sample(logits, specs)
        return [Sampled(int(row.argmax())) for row in logits.values]

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        raise NotImplementedError

    def drop_grammar(self, grammar_id: str) -> None:
        raise NotImplementedError


def real_rig(decoder: Decoder, ledger: Ledger, pages: int, page_size: int = 16, **config: object) -> Rig:
    """A rig on the real executor. What nobody wrote is NaN."""
    groups = len(decoder.config.layer_groups())
    pool = KVPool(decoder.config, [pages] * groups, page_size, decoder.dtype)
    for storage in pool.storages:
        storage.fill_(float("nan"))
    executor = TorchExecutor(decoder, pool, ledger)
    return Rig((pages,) * groups, executor=executor, page_size=page_size, **config)


def cold_rows(decoder: Decoder, prompts: Sequence[tuple[list[int], int]]) -> Ledger:
    """Rows of the same turns on engines without cache, company or pressure."""
    ledger = Ledger()
    for prompt, count in prompts:
        rig = real_rig(decoder, ledger, 64, prefix_cache=False, max_batched_tokens=1024)
        rig.submit("cold", prompt, max_tokens=count)
        rig.drain()
    return ledger
