"""A whole forward pass as one sequence of kernels: `kernels.ops.StepDecoder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.blocks import BlockMatrix, Matrix
from kernels.ops import (
    Arrivals,
    DecoderParts,
    GroupPages,
    Hidden,
    LayerParts,
    Linear,
    Logits,
    StepDecoder,
    StepGroup,
    StepRuns,
)
from kernels.triton import heads, norms, products, sampling
from kernels.triton.attention_plan import DecodeLayout
from kernels.triton.embedding import embed
from kernels.triton.graphs import Buckets, DecodeGraphs
from kernels.triton.launch import ALIGNMENT
from kernels.triton.recorder import Recorder


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer's parts with its products prepared."""

    parts: LayerParts
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


class TritonDecoder(StepDecoder):
    """Steps of one token per sequence run as they were recorded (`kernels.triton.graphs`), once `prepare` has
    recorded them; all others launch their kernels one by one."""

    def __init__(
        self, parts: DecoderParts, checked: products.Checked, recorder: Callable[[], Recorder] | None
    ) -> None:
        """checked: of products that were prepared before. recorder: None where nothing can be recorded."""
        self._parts = parts
        self._recorder = recorder
        self.graphs: DecodeGraphs | None = None
        self._arrivals: Arrivals | None = None

        def made(weight: Matrix, bias: Tensor | None) -> Linear:
            activations = parts.activations if isinstance(weight, BlockMatrix) else "float"
            return products.prepare(weight, bias, parts.dtype, activations, checked=checked)

        self._layers = tuple(
            _Layer(
                parts=layer,
                qkv=made(layer.qkv, layer.qkv_bias),
                o=made(layer.o, layer.o_bias),
                gate_up=made(layer.gate_up, layer.gate_up_bias),
                down=made(layer.down, layer.down_bias),
            )
            for layer in parts.layers
        )
        self._head = products.prepare(
            parts.lm_head, None, parts.dtype, "float", checked=checked, result=torch.float32
        )

    def forward(self, tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> Hidden:
        arrivals = self._arrivals
        if arrivals is not None and not arrivals.expecting:
            arrivals = None
        if self.graphs is not None:
            # What was recorded cannot follow what is not of the recording: it waits as a whole.
            found = self.graphs.run(tokens, positions, groups, arrivals.wait_all if arrivals else None)
            if found is not None:
                return found
        return self.compute(tokens, positions, groups, arrivals)

    def expect(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        groups: Sequence[StepGroup],
        arrivals: Arrivals | None = None,
    ) -> Hidden:
        """The step, kernel by kernel. Nothing in it waits for the device or hangs on what tensors hold.

        arrivals: what it follows, layer by layer; nothing in a step that is recorded."""
        parts = self._parts
        residual = embed(parts.embedding, tokens, parts.dtype)
        normed = norms.rms_norm(residual, parts.layers[0].attention_norm, parts.eps)
        for number, layer in enumerate(self._layers):
            attended = self._attend(layer, normed, positions, groups[layer.parts.group], arrivals)
            normed, residual = norms.add_rms_norm(attended, residual, layer.parts.mlp_norm, parts.eps)
            inner = layer.down(norms.silu_mul(layer.gate_up(normed)))
            last = number + 1 == len(self._layers)
            norm = parts.norm if last else parts.layers[number + 1].attention_norm
            normed, residual = norms.add_rms_norm(inner, residual, norm, parts.eps)
        return Hidden(normed, normed.isfinite().all(dim=-1))

    def logits(self, hidden: Tensor) -> Logits:
        values = self._head(hidden)
        return Logits(values, *sampling.best_of(values))

    @torch.inference_mode()
    def prepare(self, pages: Sequence[GroupPages], rows: int) -> str:
        """Raises ValueError for pages that kernels cannot address."""
        for held in pages:
            _check_alignment(held)
        if self._recorder is None:
            return ""
        parts, buckets = self._parts, Buckets.up_to(rows, self._parts.cos.shape[0])
        for count in buckets.rows:  # compiled now, not in somebody's first step
            self.logits(parts.norm.new_zeros((count, parts.norm.shape[0]), dtype=parts.dtype))
        self.graphs = DecodeGraphs(
            self.compute,
            pages,
            buckets,
            recorder=self._recorder(),
            lay_out=partial(DecodeLayout, dtype=parts.dtype),
            hidden=(parts.norm.shape[0], parts.dtype),
        )
        return str(self.graphs.recorded)

    @property
    def runs(self) -> StepRuns:
        return StepRuns() if self.graphs is None else self.graphs.runs

    def _attend(
        self, layer: _Layer, x: Tensor, positions: Tensor, group: StepGroup, arrivals: Arrivals | None
    ) -> Tensor:
        parts = self._parts
        kv = group.storage[:, layer.parts.index]
        qkv = layer.qkv(x)
        if arrivals is not None:
            arrivals.wait(layer.parts.group, layer.parts.index)
        q = heads.rotate_and_write(
            qkv,
            layer.parts.q_norm,
            layer.parts.k_norm,
            parts.eps,
            parts.cos,
            parts.sin,
            positions,
            layer.parts.rotary,
            kv,
            group.slots,
            parts.heads,
            parts.kv_heads,
            parts.dim,
        )
        return layer.o(group.attention(q, kv))


def _check_alignment(pages: GroupPages) -> None:
    storage = pages.storage
    part = storage.stride(1) * storage.element_size()
    if part % ALIGNMENT:
        raise ValueError(
            f"pages of {pages.shape.slots} tokens: a layer's part of {part} bytes is no multiple of "
            f"{ALIGNMENT}; take more tokens a page"
        )
