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
    AttentionShape,
    DecoderParts,
    Draw,
    GroupPages,
    Hidden,
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
from kernels.triton.pages import copy_page
from kernels.triton.recorder import Recorder

_ANY_DRAW = Draw(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, seed=0, position=0)  # takes every kernel


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What a step needs of one layer. `next_norm` is that of the layer behind it, or the last one."""

    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    next_norm: Tensor
    group: int
    index: int
    rotary: bool


class TritonDecoder(StepDecoder):
    """Steps of one token per sequence run as they were recorded (`kernels.triton.graphs`), once `prepare` has
    recorded them; all others launch their kernels one by one."""

    def __init__(
        self, parts: DecoderParts, checked: products.Checked, recorder: Callable[[], Recorder] | None
    ) -> None:
        """checked: of products that were prepared before. recorder: None where nothing can be recorded."""
        self._recorder = recorder
        self.graphs: DecodeGraphs | None = None
        self._arrivals: Arrivals | None = None
        self._dtype, self._eps = parts.dtype, parts.eps
        self._heads, self._kv_heads, self._dim = parts.heads, parts.kv_heads, parts.dim
        self._embedding, self._cos, self._sin = parts.embedding, parts.cos, parts.sin
        self._first_norm = parts.layers[0].attention_norm
        # Matrices as they were given are not kept: products have layouts of their own.
        made = partial(_product, parts, checked)
        next_norms = [*(layer.attention_norm for layer in parts.layers[1:]), parts.norm]
        self._layers = tuple(
            _Layer(
                qkv=made(layer.qkv, layer.qkv_bias),
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                o=made(layer.o, layer.o_bias),
                mlp_norm=layer.mlp_norm,
                gate_up=made(layer.gate_up, layer.gate_up_bias),
                down=made(layer.down, layer.down_bias),
                next_norm=next_norm,
                group=layer.group,
                index=layer.index,
                rotary=layer.rotary,
            )
            for layer, next_norm in zip(parts.layers, next_norms, strict=True)
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
        residual = embed(self._embedding, tokens, self._dtype)
        normed = norms.rms_norm(residual, self._first_norm, self._eps)
        for layer in self._layers:
            attended = self._attend(layer, normed, positions, groups[layer.group], arrivals)
            normed, residual = norms.add_rms_norm(attended, residual, layer.mlp_norm, self._eps)
            inner = layer.down(norms.silu_mul(layer.gate_up(normed)))
            normed, residual = norms.add_rms_norm(inner, residual, layer.next_norm, self._eps)
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
        buckets, norm = Buckets.up_to(rows, self._cos.shape[0]), self._first_norm
        # What is run here is compiled now, not in somebody's first step.
        for count in buckets.rows:
            values = self.logits(norm.new_zeros((count, norm.shape[0]), dtype=self._dtype)).values
        sampling.TritonDrawing()(values[:1], [_ANY_DRAW])
        for held in pages:
            copy_page(held.storage, 0, 0, 1)  # onto itself: nothing changes
        self.graphs = DecodeGraphs(
            self.compute,
            pages,
            buckets,
            recorder=self._recorder(),
            lay_out=_Layouts(self._dtype),
            hidden=(norm.shape[0], self._dtype),
        )
        return str(self.graphs.recorded)

    @property
    def runs(self) -> StepRuns:
        return StepRuns() if self.graphs is None else self.graphs.runs

    def _attend(
        self, layer: _Layer, x: Tensor, positions: Tensor, group: StepGroup, arrivals: Arrivals | None
    ) -> Tensor:
        kv = group.storage[:, layer.index]
        qkv = layer.qkv(x)
        if arrivals is not None:
            arrivals.wait(layer.group, layer.index)
        q = heads.rotate_and_write(
            qkv,
            layer.q_norm,
            layer.k_norm,
            self._eps,
            self._cos,
            self._sin,
            positions,
            layer.rotary,
            kv,
            group.slots,
            self._heads,
            self._kv_heads,
            self._dim,
        )
        return layer.o(group.attention(q, kv))


def _product(parts: DecoderParts, checked: products.Checked, weight: Matrix, bias: Tensor | None) -> Linear:
    """One of a layer's products."""
    activations = parts.activations if isinstance(weight, BlockMatrix) else "float"
    return products.prepare(weight, bias, parts.dtype, activations, checked=checked)


class _Layouts:
    """Attention of recorded steps, the largest first: they run one after the other, and all of one shape
    keep partial results in the same place."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._first: dict[AttentionShape, DecodeLayout] = {}

    def __call__(
        self, rows: int, pages: int, shape: AttentionShape, device: torch.device, kept: torch.dtype
    ) -> DecodeLayout:
        beside = self._first.get(shape)
        made = DecodeLayout(rows, pages, shape, device, dtype=self._dtype, kv_dtype=kept, beside=beside)
        self._first.setdefault(shape, made)
        return made


def _check_alignment(pages: GroupPages) -> None:
    storage = pages.storage
    part = storage.stride(1) * storage.element_size()
    if part % ALIGNMENT:
        raise ValueError(
            f"pages of {pages.shape.slots} tokens: a layer's part of {part} bytes is no multiple of "
            f"{ALIGNMENT}; take more tokens a page"
        )
