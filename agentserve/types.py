"""The vocabulary every room shares: ids, session states, sampling settings, finish reasons.

Plain values only. Nothing here knows how a session is scheduled, stored or sent.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NewType

import msgspec

SessionId = NewType("SessionId", str)
"""Names one session for life. Chosen by the API process; unique on a server."""

TurnId = NewType("TurnId", int)
"""Counts the turns of one session, from 1. (session, turn) names one generation."""


class SessionState(Enum):
    """Public states of a session, in the field's own terms.

    PREFILLING and DECODING are labels: both mean "running", and differ only in how far
    `computed` lags behind the tokens. The scheduler never asks which of the two it is.
    """

    IDLE = "IDLE"
    WAITING = "WAITING"
    PREFILLING = "PREFILLING"
    DECODING = "DECODING"
    PREEMPTED = "PREEMPTED"
    WAITING_TOOL = "WAITING_TOOL"
    FINISHED = "FINISHED"


class FinishReason(Enum):
    """Why a turn ended. The first two are a model's own end; the others are imposed."""

    STOP = "stop"  # EOS, a stop token, a stop string, or the end of the grammar
    LENGTH = "length"  # max_tokens, the context, or the whole KV pool is used up
    ABORTED = "aborted"  # the client went away or cancelled; the turn is rolled back
    REFUSED = "refused"  # could never run, or its grammar could not be followed; the turn is rolled back
    SHED = "shed"  # its promise could not be kept, and it was not begun; the turn is rolled back
    ERROR = "error"  # the executor failed on this turn; the turn is rolled back


class ReasoningCap(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much a turn may reason: behind `tokens` of them comes the token that closes it."""

    tokens: int
    close: int  # token id
    open: int | None = None  # token id; None: reasoning begins with the prompt's end or not at all
    inside: bool = False  # it begins there


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one turn picks its tokens. Validated by whoever builds it; the engine trusts it.

    Random draws are counter-based: the token at position p depends on (seed, p) alone, so a
    recomputed, preempted or migrated session draws the same tokens.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and generated tokens (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over generated tokens only, as OpenAI's
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0  # no end of turn before this many tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # stop strings; found by the worker, cut from the text by the API process
    logprobs: int | None = None  # None: none; k: the token's own log-probability and the k best
    grammar: str | None = None  # id of a grammar defined on the worker beforehand
    reasoning: ReasoningCap | None = None


class Slo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Promises for one turn, in seconds. None: none was made."""

    ttft: float | None = None  # to the first token, from arrival, queueing included
    tbt: float | None = None  # from token to token; what one is early, those after it may use up
    gap: float | None = None  # between any two tokens, however early the first of them was
    tpot: float | None = None  # per token after the first, on average over the turn
    total: float | None = None  # to the last token

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: expected seconds above 0, got {value}")

    @property
    def pace(self) -> float | None:
        """Seconds per token that keep the promises about tokens which time gained counts for; None: none."""
        promised = [value for value in (self.tbt, self.tpot) if value is not None]
        return min(promised, default=None)


NO_SLO = Slo()


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share one memory law: one page table, one pool, one price per page.

    A dense model has one group. Nothing may assume that bytes per token are one constant.
    """

    name: str
    layers: tuple[int, ...]  # model layer numbers, ascending
    page_bytes: int  # bytes of one page: page_size slots, K and V, all layers of the group
    window: int | None = None  # sliding window in tokens; None attends to everything
