"""The forward pass of every supported architecture, over flat token rows and paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentserve.models.config import DecoderConfig
from agentserve.models.inputs import Batch
from agentserve.models.parallel import JoinedLinear, Ranks, SummedLinear
from agentserve.models.rope import rope_table
from agentserve.models.weights import DecoderWeights
from kernels.blocks import BlockMatrix, Matrix, expand_rows
from kernels.ops import (
    Activations,
    Arrivals,
    DecoderParts,
    GroupPages,
    Hidden,
    LayerParts,
    Linear,
    Logits,
    Ops,
    StepDecoder,
    StepGroup,
    StepRuns,
)


class Decoder:
    """A decoder-only transformer on one device.

    `positions` bounds the context: rotary tables are made for that many (default: all that the
    config allows). `activations` "int8" is for weights in blocks (ValueError where no layer has any).
    A backend that has the whole step as one operation keeps the weights in its own
    layout; then `weights` is not referred to any more.

    `ranks`: those that compute it together with this one. `config` and `weights` are then this rank's
    (`models.shard`), and each rank must be given the same batches, and the same rows for `logits`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        ops: Ops,
        positions: int | None = None,
        activations: Activations = "float",
        *,
        ranks: Ranks | None = None,
    ) -> None:
        if activations != "float" and not weights.layers_in_blocks:
            raise ValueError(f"{activations} activations are for weights in blocks; this model has none")
        self.config = config
        self.ops = ops
        self.positions = min(positions or config.max_position, config.max_position)
        self.dtype = weights.dtype
        self.device = weights.norm.device
        self.parameters = weights.parameters
        self.step_bytes = weights.step_bytes
        cos, sin = rope_table(config.rope, config.head_dim, self.positions, weights.rope_factors)
        parts = _parts(config, weights, activations, (cos.to(self.device), sin.to(self.device)))
        whole = ops.decoder(parts) if ranks is None else None
        self._step: StepDecoder = whole or ComposedDecoder(ops, parts, ranks)

    def forward(self, batch: Batch) -> Hidden:
        """Write the batch's KV and return the last layer's normed output."""
        return self._step.forward(batch.tokens, batch.positions, batch.groups)

    def logits(self, hidden: Tensor) -> Logits:
        """Logits of `[rows, hidden]` from `forward`. Ask only for rows to sample.

        The next call may reuse the memory of their `values`. With several ranks those of the whole
        vocabulary are the first rank's; the others get their own tokens'.
        """
        return self._step.logits(hidden)

    def prepare(self, pages: Sequence[GroupPages], rows: int) -> str:
        """`kernels.ops.StepDecoder.prepare`."""
        return self._step.prepare(pages, rows)

    def expect(self, arrivals: Arrivals) -> None:
        """`kernels.ops.StepDecoder.expect`."""
        self._step.expect(arrivals)

    @property
    def runs(self) -> StepRuns:
        return self._step.runs


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer's parts with its products prepared."""

    parts: LayerParts
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


class ComposedDecoder(StepDecoder):
    """`kernels.ops.StepDecoder` out of a backend's single operations."""

    def __init__(self, ops: Ops, parts: DecoderParts, ranks: Ranks | None = None) -> None:
        self._ops = ops
        self._parts = parts
        self._ranks = ranks
        self._arrivals: Arrivals | None = None
        self._layers = tuple(
            _Layer(
                parts=layer,
                qkv=self._linear(layer.qkv, layer.qkv_bias),
                o=self._summed(layer.o, layer.o_bias),
                gate_up=self._linear(layer.gate_up, layer.gate_up_bias),
                down=self._summed(layer.down, layer.down_bias),
            )
            for layer in parts.layers
        )
        head = ops.linear(parts.lm_head, dtype=parts.dtype)
        self._head = head if ranks is None else JoinedLinear(head, ranks, parts.embedding.shape[0])

    def expect(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def forward(self, tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> Hidden:
        parts, ops, eps = self._parts, self._ops, self._parts.eps
        residual = expand_rows(parts.embedding, tokens, parts.dtype)
        cos, sin = parts.cos[positions], parts.sin[positions]
        normed = ops.rms_norm(residual, parts.layers[0].attention_norm, eps)
        for number, layer in enumerate(self._layers):
            attended = self._attend(layer, normed, groups[layer.parts.group], cos, sin)
            normed, residual = ops.add_rms_norm(attended, residual, layer.parts.mlp_norm, eps)
            inner = layer.down(ops.silu_mul(layer.gate_up(normed)))
            last = number + 1 == len(self._layers)
            norm = parts.norm if last else parts.layers[number + 1].attention_norm
            normed, residual = ops.add_rms_norm(inner, residual, norm, eps)
        return Hidden(normed, normed.isfinite().all(dim=-1))

    def logits(self, hidden: Tensor) -> Logits:
        return Logits.of(self._head(hidden).to(torch.float32))

    def _linear(self, weight: Matrix, bias: Tensor | None) -> Linear:
        parts = self._parts
        activations = parts.activations if isinstance(weight, BlockMatrix) else "float"
        return self._ops.linear(weight, bias, dtype=parts.dtype, activations=activations)

    def _summed(self, weight: Matrix, bias: Tensor | None) -> Linear:
        """A product that ranks share by columns."""
        linear = self._linear(weight, bias)
        return linear if self._ranks is None else SummedLinear(linear, self._ranks)

    def _attend(self, layer: _Layer, x: Tensor, group: StepGroup, cos: Tensor, sin: Tensor) -> Tensor:
        parts, ops = self._parts, self._ops
        heads, kv_heads = parts.heads, parts.kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, parts.dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.parts.q_norm is not None and layer.parts.k_norm is not None:
            q = ops.rms_norm(q, layer.parts.q_norm, parts.eps)
            k = ops.rms_norm(k, layer.parts.k_norm, parts.eps)
        if layer.parts.rotary:
            q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        if self._arrivals is not None and self._arrivals.expecting:
            self._arrivals.wait(layer.parts.group, layer.parts.index)
        kv = group.storage[:, layer.parts.index]
        ops.write_kv(kv, group.slots, k, v)
        return layer.o(group.attention(q.contiguous(), kv))


def _parts(
    config: DecoderConfig, weights: DecoderWeights, activations: Activations, table: tuple[Tensor, Tensor]
) -> DecoderParts:
    place = {
        layer: (number, index)
        for number, group in enumerate(config.layer_groups())
        for index, layer in enumerate(group.layers)
    }
    return DecoderParts(
        dtype=weights.dtype,
        activations=activations,
        heads=config.heads,
        kv_heads=config.kv_heads,
        dim=config.head_dim,
        eps=config.rms_eps,
        embedding=weights.embedding,
        layers=[
            LayerParts(
                attention_norm=layer.attention_norm,
                qkv=layer.qkv,
                qkv_bias=layer.qkv_bias,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                o=layer.o,
                o_bias=layer.o_bias,
                mlp_norm=layer.mlp_norm,
                gate_up=layer.gate_up,
                gate_up_bias=layer.gate_up_bias,
                down=layer.down,
                down_bias=layer.down_bias,
                group=place[number][0],
                index=place[number][1],
                rotary=config.rotary[number],
            )
            for number, layer in enumerate(weights.layers)
        ],
        norm=weights.norm,
        lm_head=weights.lm_head,
        cos=table[0],
        sin=table[1],
    )
