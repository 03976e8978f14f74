"""What rounding costs: one model in different numbers reads one text, each beside the exact one.

Exact is the reference backend in float32 on expanded weights: the values of the file themselves,
computed by torch. The text is cut into windows (`quality_reading.windows`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor

from agentserve.bench.quality_reading import (
    HEAD_ROWS,
    WINDOW,
    NotFinite,
    Window,
    logits,
    predicted,
    read,
    windows,
)
from agentserve.bench.quality_scores import Divergence, score
from agentserve.executor.pool import KV_DTYPES
from agentserve.machine import available_memory
from agentserve.models.decoder import Decoder
from agentserve.models.load import DTYPES, LoadedModel, OpenModel, open_model
from agentserve.models.source import ModelSource
from agentserve.values import show_size
from kernels import ops_for
from kernels.ops import Activations, Ops
from kernels.reference import ReferenceOps

CPU = torch.device("cpu")


class Variant(msgspec.Struct, frozen=True):
    """One way to compute. `fastest` is the backend that a server on this machine would use."""

    backend: Literal["reference", "fastest"]
    dtype: Literal["fp32", "bf16"]
    weights: Literal["expanded", "stored"]
    activations: Activations = "float"
    kv_dtype: Literal["as computed", "fp16", "int8"] = "as computed"


EXACT = Variant("reference", "fp32", "expanded")
BF16_REFERENCE = Variant("reference", "bf16", "expanded")
VARIANTS = (
    EXACT,
    Variant("fastest", "fp32", "expanded"),
    Variant("fastest", "fp32", "stored"),
    Variant("fastest", "fp32", "stored", "int8"),
    BF16_REFERENCE,
    Variant("fastest", "bf16", "expanded"),
    Variant("fastest", "bf16", "stored"),
    Variant("fastest", "bf16", "stored", kv_dtype="fp16"),
    Variant("fastest", "bf16", "stored", kv_dtype="int8"),
    Variant("fastest", "bf16", "stored", "int8"),
    Variant("fastest", "bf16", "stored", "int8", "int8"),
)
"""Those of one (dtype, weights) stand together: each is loaded once."""
_STORED = (Variant("fastest", "fp32", "stored"), Variant("fastest", "bf16", "stored"))


class Finding(msgspec.Struct, frozen=True):
    """What one variant made of the text."""

    variant: Variant
    backend: str  # as `/health` shows it
    perplexity: float
    from_exact: Divergence | None  # None: it is the exact one
    from_bf16_reference: Divergence | None  # for bf16 on the same expanded weights: the backend's own share


class LeftOut(msgspec.Struct, frozen=True):
    """A variant that this model or machine cannot compute."""

    variant: Variant
    reason: str


class Quality(msgspec.Struct, frozen=True):
    """All findings on one text."""

    model: str
    digest: str  # of the weight files
    formats: Sequence[str]  # of the blocks in them, the one with most weights first
    text: str  # SHA-256
    tokens: int
    predicted: int
    window: int  # tokens; shorter than `WINDOW` where the model's context is
    findings: Sequence[Finding]
    left_out: Sequence[LeftOut]


class QualityReport(msgspec.Struct, frozen=True, kw_only=True):
    """As `benchmarks/results/quality.json` has it."""

    benchmark: str = "quality"
    command: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    found: Quality


@dataclass(frozen=True, slots=True)
class Text:
    """A text as tokens of the model's, as `/v1/completions` would have them."""

    digest: str
    tokens: Sequence[int]

    @classmethod
    def of(cls, text: str, encode: Callable[[str], Sequence[int]]) -> Text:
        return cls(hashlib.sha256(text.encode()).hexdigest(), encode(text))


def measure(
    source: ModelSource,
    text: Text,
    page_size: int,
    variants: Sequence[Variant] = VARIANTS,
    found: Callable[[Finding | LeftOut], None] = lambda _: None,
) -> Quality:
    """Let every variant read `text`; the first must be `EXACT`. `found` hears of each as it is done.

    ValueError (ModelError) where the text is too short, memory does not suffice for the exact logits,
    or the model cannot be read; a variant that cannot be computed here is left out.
    """
    if not variants or variants[0] != EXACT:
        raise ValueError("the first variant must be the exact one, which all others are compared with")
    opened = open_model(source)
    config = opened.config
    length = min(WINDOW, config.max_position)
    cut = windows(text.tokens, length)
    if not cut:
        raise ValueError(f"the text has {len(text.tokens)} tokens: nothing to predict")
    _check_memory(predicted(cut).numel() * config.vocab_size)
    reader = Reader(cut, page_size)
    findings: list[Finding] = []
    left_out: list[LeftOut] = []
    digest = ""
    formats: tuple[str, ...] = ()
    for loaded, variant in _loaded(opened, variants):
        digest, formats = loaded.digest, formats or loaded.weights.formats
        result = reader.read(loaded, variant)
        if isinstance(result, Finding):
            findings.append(result)
        else:
            left_out.append(result)
        found(result)
    return Quality(
        model=source.name,
        digest=digest,
        formats=formats,
        text=text.digest,
        tokens=len(text.tokens),
        predicted=len(reader.tokens),
        window=length,
        findings=findings,
        left_out=left_out,
    )


def _loaded(opened: OpenModel, variants: Sequence[Variant]) -> Iterator[tuple[LoadedModel, Variant]]:
    """Each variant with its weights; neighbours of the same numbers share them."""
    have: tuple[str, str] | None = None
    loaded: LoadedModel | None = None
    for variant in variants:
        want = (variant.dtype, variant.weights)
        if loaded is None or want != have:
            loaded = None  # two models at a time are not needed
            loaded = opened.load(DTYPES[variant.dtype], CPU, variant.weights)
            have = want
        yield loaded, variant


class Reader:
    """Reads the windows once per variant, and keeps the logits that others are compared with."""

    def __init__(self, cut: Sequence[Window], page_size: int) -> None:
        self.tokens = predicted(cut)
        self._cut = cut
        self._page_size = page_size
        self._fastest = ops_for(CPU)
        self._reference = ReferenceOps(CPU)
        self._kept: dict[Variant, Tensor] = {}

    def read(self, loaded: LoadedModel, variant: Variant) -> Finding | LeftOut:
        """What `variant` makes of the text, `loaded` being the model with the weights that it names.

        `NotFinite` if the exact model predicts nothing: then there is nothing to compare with.
        """
        reason = self._missing(loaded, variant)
        if reason:
            return LeftOut(variant, reason)
        decoder = self.decoder(loaded, variant)
        try:
            hidden = read(decoder, kv_dtype(variant), self._cut, self._page_size)
        except NotFinite as error:
            if variant == EXACT:
                raise
            return LeftOut(variant, str(error))
        slices = logits(decoder, hidden)
        if variant in (EXACT, BF16_REFERENCE):
            self._kept[variant] = whole = _whole(slices, len(hidden), loaded.config.vocab_size)
            slices = iter(torch.split(whole, HEAD_ROWS))
        against = [other for other in self._kept if other != variant and _comparable(other, variant)]
        perplexity, divergences = score(slices, self.tokens, [self._kept[other] for other in against])
        found = dict(zip(against, divergences, strict=True))
        backend = decoder.ops.name
        return Finding(variant, backend, perplexity, found.get(EXACT), found.get(BF16_REFERENCE))

    def decoder(self, loaded: LoadedModel, variant: Variant) -> Decoder:
        """The model as `variant` computes it, with a context of one window."""
        longest = max(len(window) for window in self._cut)
        ops, activations = self._ops(variant), variant.activations
        return Decoder(loaded.config, loaded.weights, ops, positions=longest, activations=activations)

    def _ops(self, variant: Variant) -> Ops:
        return self._reference if variant.backend == "reference" else self._fastest

    def _missing(self, loaded: LoadedModel, variant: Variant) -> str:
        """Why a variant cannot be computed; empty if it can."""
        if variant.backend == "fastest" and isinstance(self._fastest, ReferenceOps):
            return "this machine has only the reference backend"
        if variant.activations != "float" and not loaded.weights.layers_in_blocks:
            return (
                f"{variant.activations} activations are for block weights, and this model's layers have none"
            )
        if variant in _STORED and not loaded.weights.formats:
            return "this model has no block weights: stored and expanded are the same"
        if kv_dtype(variant) not in self._ops(variant).kv_dtypes(DTYPES[variant.dtype]):
            return f"the backend keeps no {variant.kv_dtype} KV"
        return ""


def _comparable(kept: Variant, variant: Variant) -> bool:
    return kept == EXACT or variant == Variant("fastest", kept.dtype, kept.weights)


def kv_dtype(variant: Variant) -> torch.dtype:
    """What KV pages hold."""
    return KV_DTYPES[variant.dtype if variant.kv_dtype == "as computed" else variant.kv_dtype]


def _whole(slices: Iterator[Tensor], rows: int, vocab: int) -> Tensor:
    """All slices in one tensor; there is never more than one slice beside it."""
    whole = torch.empty((rows, vocab))
    row = 0
    for part in slices:
        whole[row : row + len(part)] = part
        row += len(part)
    return whole


def _check_memory(numbers: int) -> None:
    """The logits of `EXACT` and `BF16_REFERENCE`, `numbers` each in float32, must fit into half of what
    is there: models need room too."""
    available, needed = available_memory(), 2 * 4 * numbers
    if available is not None and needed > available // 2:
        raise ValueError(
            f"comparing needs {show_size(needed)} for logits and has {show_size(available)} in all: "
            "take a shorter text"
        )
