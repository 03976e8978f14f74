"""A sampler of a small vocabulary, and random rows of logits for it."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from agentserve.core.plan import SampleSpec
from agentserve.executor.sampler import Sampler
from agentserve.types import Sampling, SessionId, TurnId
from kernels.ops import Logits

VOCAB, EOS = 500, 3
TOKEN_BYTES = [b"", b"", b"", b"", *(bytes([97 + i % 26]) for i in range(VOCAB - 4))]


def make(**kwargs: Any) -> Sampler:
    return Sampler(VOCAB, TOKEN_BYTES, [EOS], **kwargs)


def spec(sampling: Sampling, tokens: Sequence[int], prompt: int) -> SampleSpec:
    return SampleSpec(sampling, array("i", tokens), prompt, len(tokens))


def row(seed: int, ties: bool = False) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3
    return np.round(values) if ties else values


def one(sampler: Sampler, logits: ArrayLike, request: SampleSpec, session: str = "s", turn: int = 1) -> Any:
    tensor = torch.tensor(np.asarray(logits)).reshape(1, -1).clone()
    return sampler.sample(Logits.of(tensor), [(SessionId(session), TurnId(turn), request)])[0]
