"""The forward pass of every supported architecture, over flat token rows and paged KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentserve.models.config import DecoderConfig
from agentserve.models.inputs import Batch, PagedGroup
from agentserve.models.rope import rope_table
from agentserve.models.weights import DecoderWeights, LayerWeights
from kernels.ops import Linear, Ops


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer's weights, its products prepared, and where its KV lies."""

    weights: LayerWeights
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    group: int  # KV group
    index: int  # of this layer inside the group
    rotary: bool


class Decoder:
    """A decoder-only transformer on one device.

    `positions` bounds the context: rotary tables are made for that many (default: all that the
    config allows).
    """

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, ops: Ops, positions: int | None = None
    ) -> None:
        self.config = config
        self.ops = ops
        self.positions = min(positions or config.max_position, config.max_position)
        self._weights = weights
        cos, sin = rope_table(config.rope, config.head_dim, self.positions, weights.rope_factors)
        self._cos, self._sin = cos.to(weights.embedding.device), sin.to(weights.embedding.device)
        self._layers = self._prepare()
        self._head = ops.linear(weights.lm_head)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    @property
    def parameters(self) -> int:
        return self._weights.parameters

    def forward(self, batch: Batch) -> Tensor:
        """Write the batch's KV and return the last layer's normed output, `[rows, hidden]`."""
        config, ops = self.config, self.ops
        residual = self._weights.embedding[batch.tokens]
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        normed = ops.rms_norm(residual, self._layers[0].weights.attention_norm, config.rms_eps)
        for number, layer in enumerate(self._layers):
            attended = self._attend(layer, normed, batch.groups[layer.group], cos, sin)
            normed, residual = ops.add_rms_norm(attended, residual, layer.weights.mlp_norm, config.rms_eps)
            inner = layer.down(ops.silu_mul(layer.gate_up(normed)))
            last = number + 1 == len(self._layers)
            norm = self._weights.norm if last else self._layers[number + 1].weights.attention_norm
            normed, residual = ops.add_rms_norm(inner, residual, norm, config.rms_eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` from `forward` -> `[rows, vocab]` float32. Ask only for rows to sample."""
        return self._head(hidden).to(torch.float32)

    def _attend(self, layer: _Layer, x: Tensor, group: PagedGroup, cos: Tensor, sin: Tensor) -> Tensor:
        config, ops, weights = self.config, self.ops, layer.weights
        heads, kv_heads = config.heads, config.kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = ops.rms_norm(q, weights.q_norm, config.rms_eps)
            k = ops.rms_norm(k, weights.k_norm, config.rms_eps)
        if layer.rotary:
            q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        kv = group.storage[:, layer.index]
        ops.write_kv(kv, group.slots, k, v)
        return layer.o(group.attention(q.contiguous(), kv))

    def _prepare(self) -> tuple[_Layer, ...]:
        place = {
            layer: (number, index)
            for number, group in enumerate(self.config.layer_groups())
            for index, layer in enumerate(group.layers)
        }
        linear = self.ops.linear
        return tuple(
            _Layer(
                weights=weights,
                qkv=linear(weights.qkv, weights.qkv_bias),
                o=linear(weights.o, weights.o_bias),
                gate_up=linear(weights.gate_up, weights.gate_up_bias),
                down=linear(weights.down, weights.down_bias),
                group=place[number][0],
                index=place[number][1],
                rotary=self.config.rotary[number],
            )
            for number, weights in enumerate(self._weights.layers)
        )
