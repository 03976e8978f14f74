"""The plan: one step's frozen work order, and what comes back from running it.

The core writes a `Plan`, an executor (real or simulated) runs it, the core reads the
`StepResult`. Everything the executor needs is in the plan; nobody owns or changes it. Plans that
follow each other share what has not changed, as the page tables of a turn that decodes.

All of it is structs without cycles, which the collector need not look at: a plan of hundreds of
rows is made and booked in each step.

Contract for executors:
- run `copies` first, then `chunks`;
- for each chunk write the KV of `tokens` at positions `start .. start+len(tokens)-1` into the
  pages of `tables`, attending to positions 0 .. own;
- where `sample` is given, sample one token from the logits of the chunk's last token;
- return one `ChunkResult` per chunk, in order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from agentserve.core.timing.features import StepLoad
from agentserve.types import Sampling, SessionId, TurnId


class PageCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy the first `slots` token slots, all layers of KV group `group`, between two pages."""

    group: int
    source: int
    target: int
    slots: int


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """What sampling needs. Penalties, grammar and stop strings are folds over `history`.

    `history` is the session's live token array: valid to read up to `length` until the step's
    result is handed back. `history[prompt:length]` was generated in this turn; the new token
    gets position `length`.
    """

    sampling: Sampling
    history: Sequence[int]
    prompt: int
    length: int


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A run of one session's uncomputed tokens."""

    session: SessionId
    turn: TurnId
    epoch: int  # the session's run epoch; a result with another one is stale
    start: int
    tokens: array[int]  # int32
    tables: tuple[array[int], ...]  # per KV group: pages of positions 0 .. start+len(tokens)-1
    sample: SampleSpec | None


class Plan(msgspec.Struct, frozen=True, gc=False):
    step: int
    copies: tuple[PageCopy, ...]
    chunks: tuple[Chunk, ...]
    predicted_seconds: float
    # Sessions left out or cut short, and by which limit. Waiting sessions are looked at in order; those
    # behind the last one named wait behind it.
    reasons: tuple[tuple[SessionId, str], ...]
    load: StepLoad | None = None  # what the time was predicted from
    bound_seconds: float = 0.0  # what the step hardly exceeds

    @property
    def tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sampled token; `ended` says that a stop string or the grammar ended the turn with it."""

    token: int
    logprob: float | None = None  # of the raw model distribution, before temperature and masks
    top: tuple[tuple[int, float], ...] = ()
    ended: bool = False


class ChunkResult(msgspec.Struct, frozen=True, gc=False):
    session: SessionId
    turn: TurnId
    epoch: int
    computed: int  # token rows that were run for this chunk
    sampled: Sampled | None = None
    error: str = ""  # not empty: this chunk failed and its KV is not valid
    refused: bool = False  # it failed for what its request asks


class StepResult(msgspec.Struct, frozen=True, gc=False):
    step: int
    chunks: tuple[ChunkResult, ...]
    seconds: float
