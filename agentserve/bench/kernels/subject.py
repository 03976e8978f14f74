"""The model in the variants that are compared, sharing one KV pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agentserve.bench.kernels.clocked import KernelClock, clocked
from agentserve.bench.kernels.costs import Costs
from agentserve.bench.limits import DTYPE_NAMES
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import TorchExecutor
from agentserve.executor.sampler import Sampler
from agentserve.models.config import DecoderConfig
from agentserve.models.decoder import Decoder
from agentserve.models.load import LoadedModel, WeightStorage, open_model
from agentserve.models.source import ModelSource
from agentserve.models.weights import DecoderWeights
from kernels.blocks import BlockMatrix, Matrix
from kernels.ops import Activations, Ops

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Choice:
    """How the model is kept and computed with."""

    weights: WeightStorage
    activations: Activations


ALL = (Choice("expanded", "float"), Choice("stored", "float"), Choice("stored", "int8"))


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """One variant, ready to build its decoder."""

    name: str  # "bf16", "Q4_1", "Q4_1 int8"
    config: DecoderConfig
    weights: DecoderWeights
    activations: Activations
    ops: Ops

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    def matrices(self) -> Mapping[str, Sequence[Matrix]]:
        """The model's matrices by what they do; the layers' ones of all layers."""
        layers = self.weights.layers
        return {
            "qkv": [layer.qkv for layer in layers],
            "o": [layer.o for layer in layers],
            "gate_up": [layer.gate_up for layer in layers],
            "down": [layer.down for layer in layers],
            "head": [self.weights.lm_head],
        }

    def multiplied_in(self, matrix: Matrix) -> Activations:
        """What one of the layers' matrices is multiplied with: 8-bit activations are for blocks."""
        return self.activations if isinstance(matrix, BlockMatrix) else "float"

    def costs(self, kv_dtype: torch.dtype) -> Costs:
        head = self.weights.lm_head
        inside = [matrix for layer in self.weights.layers for matrix in layer.matrices]
        return Costs(
            config=self.config,
            inside=sum(matrix.numel() for matrix in inside),
            head=head.numel(),
            inside_bytes=sum(matrix.nbytes for matrix in inside),
            head_bytes=head.nbytes,
            kv_dtype=kv_dtype,
            integers=sum(matrix.numel() for matrix in inside if self.multiplied_in(matrix) == "int8"),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A subject whose decoder runs in an executor of its own over the common pool."""

    name: str
    decoder: Decoder
    executor: TorchExecutor
    clock: KernelClock
    costs: Costs


def subjects(
    source: ModelSource, dtype: torch.dtype, choices: Sequence[Choice], ops: Ops
) -> tuple[list[Subject], dict[str, str]]:
    """The variants that this model has, and why the others are missing.

    Every way of keeping the weights is loaded once. A `ModelError` if the model cannot be read.
    """
    opened = open_model(source)
    loaded: dict[str, LoadedModel] = {}
    found: list[Subject] = []
    missing: dict[str, str] = {}
    for choice in choices:
        if choice.weights not in loaded:
            loaded[choice.weights] = opened.load(dtype, CPU, choice.weights)
        model = loaded[choice.weights]
        label = f"weights {choice.weights}, activations {choice.activations}"
        if choice.weights == "stored" and not model.weights.layers_in_blocks:
            missing[label] = "the model's layers have no quantised blocks"
            continue
        name = _name(model.weights, choice)
        found.append(Subject(name, model.config, model.weights, choice.activations, ops))
    return found, missing


def variant(subject: Subject, pool: KVPool, positions: int) -> Variant:
    """Build the decoder (which packs its weights) and what runs its steps."""
    clock = KernelClock()
    decoder = Decoder(
        subject.config, subject.weights, clocked(subject.ops, clock), positions, subject.activations
    )
    sampler = Sampler(
        subject.config.vocab_size, [b""] * subject.config.vocab_size, (), drawing=subject.ops.drawing()
    )
    executor = TorchExecutor(decoder, pool, sampler)
    return Variant(subject.name, decoder, executor, clock, subject.costs(pool.dtype))


def _name(weights: DecoderWeights, choice: Choice) -> str:
    if choice.weights == "expanded":
        return DTYPE_NAMES[weights.dtype]
    kept = weights.formats[0]
    return kept if choice.activations == "float" else f"{kept} {choice.activations}"
