"""A whole forward pass as one call: `kernels.ops.StepDecoder` on the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.blocks import Matrix
from kernels.cpu.attention import CpuAttention, kind_of
from kernels.cpu.library import PAIRS, TYPES, Group, Layer, Library, Model, address
from kernels.cpu.packed import Arena, PackedMatrix, packed_bytes, padded
from kernels.memory import huge_bytes
from kernels.ops import Activations, DecoderParts, Hidden, LayerParts, Logits, StepDecoder, StepGroup

_MOST_DIM = 512  # head dimension (`MAX_DIM` in csrc/element.h)


class CpuDecoder(StepDecoder):
    """Packs a decoder's weights and keeps only the packed ones.

    A tied embedding is read out of the head's panels, so that it is not kept twice.
    """

    def __init__(self, library: Library, parts: DecoderParts) -> None:
        self._library = library
        self._hidden = parts.norm.shape[0]
        self._vocab = parts.lm_head.shape[0]
        self._dtype = parts.dtype
        self._activations: Activations = parts.activations
        self._keep: list[Tensor | PackedMatrix] = []  # what the model's pointers point at
        self._arena = Arena(sum(padded(size) for size in _sizes(library, parts)))
        layers = (Layer * len(parts.layers))(*(self._layer(layer) for layer in parts.layers))
        head = self._packed(parts.lm_head, None, "float")
        tied = parts.embedding is parts.lm_head
        self._model = Model(
            hidden=self._hidden,
            inner=parts.layers[0].down.shape[1],
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            dim=parts.dim,
            layers=len(parts.layers),
            eps=parts.eps,
            embedding=head if tied else self._packed(parts.embedding, None, "float"),
            head=head,
            norm=self._kept(_wide(parts.norm)),
            cos=self._kept(_wide(parts.cos)),
            sin=self._kept(_wide(parts.sin)),
            layer=ctypes.cast(layers, ctypes.POINTER(Layer)),
        )
        self._layers = layers
        self._room = torch.empty(0, self._vocab, dtype=torch.float32)
        self._opened: int | None = library.open(TYPES[self._dtype], ctypes.byref(self._model))

    def __del__(self) -> None:
        opened, self._opened = getattr(self, "_opened", None), None
        if opened is not None:
            self._library.close(opened)

    @staticmethod
    def fits(parts: DecoderParts) -> bool:
        """Whether the library can run such a model: its widths must be whole lanes."""
        pair = PAIRS.get(parts.dtype, 0)
        widths = (parts.norm.shape[0], parts.layers[0].down.shape[1], parts.dim)
        return bool(pair) and not any(width % pair for width in widths) and parts.dim <= _MOST_DIM

    def forward(self, tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> Hidden:
        rows = tokens.shape[0]
        out = torch.empty(rows, self._hidden, dtype=self._dtype)
        finite = torch.empty(rows, dtype=torch.bool)
        given = (Group * len(groups))(*(_group(group) for group in groups))
        self._library.forward(
            self._opened,
            rows,
            tokens.data_ptr(),
            positions.data_ptr(),
            given,
            len(groups),
            out.data_ptr(),
            finite.data_ptr(),
            torch.get_num_threads(),
        )
        return Hidden(out, finite)

    def logits(self, hidden: Tensor) -> Logits:
        hidden, rows = hidden.contiguous(), hidden.shape[0]
        values = self._values(rows)
        best = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        self._library.logits(
            self._opened,
            rows,
            hidden.data_ptr(),
            values.data_ptr(),
            best.data_ptr(),
            finite.data_ptr(),
            torch.get_num_threads(),
        )
        return Logits(values, best, finite)

    def _values(self, rows: int) -> Tensor:
        """`[rows, vocab]` in the memory of the last call: fresh memory of this size costs a page fault per
        thousand logits, and as much again when it is given back."""
        held = len(self._room)
        if held < rows:
            self._room = huge_bytes(rows * self._vocab * 4).view(torch.float32).view(rows, self._vocab)
        return self._room if held == rows else self._room[:rows]

    def _layer(self, parts: LayerParts) -> Layer:
        return Layer(
            qkv=self._packed(parts.qkv, parts.qkv_bias, self._activations),
            o=self._packed(parts.o, parts.o_bias, self._activations),
            gate_up=self._packed(parts.gate_up, parts.gate_up_bias, self._activations, pair_halves=True),
            down=self._packed(parts.down, parts.down_bias, self._activations),
            attention_norm=self._kept(_wide(parts.attention_norm)),
            mlp_norm=self._kept(_wide(parts.mlp_norm)),
            q_norm=None if parts.q_norm is None else self._kept(_wide(parts.q_norm)),
            k_norm=None if parts.k_norm is None else self._kept(_wide(parts.k_norm)),
            group=parts.group,
            index=parts.index,
            rotary=parts.rotary,
        )

    def _packed(
        self, weight: Matrix, bias: Tensor | None, activations: Activations, *, pair_halves: bool = False
    ) -> ctypes.Structure:
        packed = PackedMatrix(
            self._library,
            weight,
            bias,
            dtype=self._dtype,
            activations=activations,
            pair_halves=pair_halves,
            arena=self._arena,
        )
        self._keep.append(packed)
        return packed.matrix

    def _kept(self, tensor: Tensor) -> int | None:
        self._keep.append(tensor)
        return address(tensor)


def _group(group: StepGroup) -> Group:
    attention, storage = group.attention, group.storage
    if not isinstance(attention, CpuAttention):
        raise TypeError("attention was laid out by another backend")
    _, _, _, slots, _, width = storage.shape
    kind, _ = kind_of(storage.dtype, width)
    page_stride, layer_stride, *_ = storage.stride()
    return Group(
        storage.data_ptr(),
        page_stride,
        layer_stride,
        group.slots.data_ptr(),
        attention.plan,
        slots,
        kind,
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()


def _sizes(library: Library, parts: DecoderParts) -> Iterator[int]:
    """Bytes of every packed matrix."""
    plain = [parts.lm_head]
    if parts.embedding is not parts.lm_head:
        plain.append(parts.embedding)
    for layer in parts.layers:
        plain += (layer.qkv, layer.o, layer.down)
        yield packed_bytes(library, layer.gate_up, parts.dtype, pair_halves=True)
    for weight in plain:
        yield packed_bytes(library, weight, parts.dtype)
