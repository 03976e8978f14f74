"""A whole forward pass as one call: `kernels.ops.StepDecoder` on the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.attention import CpuAttention, pages_of
from kernels.cpu.library import PAIRS, TYPES, Group, Layer, Library, Model, address
from kernels.cpu.packed import Arena, PackedMatrix, packed_bytes, padded
from kernels.ops import DecoderParts, LayerParts, StepDecoder, StepGroup

_MOST_DIM = 512  # head dimension (`MAX_DIM` in csrc/element.h)


class CpuDecoder(StepDecoder):
    """Packs a decoder's weights and keeps only the packed ones.

    A tied embedding is read out of the head's panels, so that it is not kept twice.
    """

    def __init__(self, library: Library, parts: DecoderParts) -> None:
        self._library = library
        self._hidden = parts.norm.shape[0]
        self._vocab = parts.lm_head.shape[0]
        self._dtype = parts.norm.dtype
        self._keep: list[Tensor | PackedMatrix] = []  # what the model's pointers point at
        self._arena = Arena(sum(padded(size) for size in _sizes(parts)))
        layers = (Layer * len(parts.layers))(*(self._layer(layer) for layer in parts.layers))
        tied = parts.embedding is parts.lm_head
        self._model = Model(
            hidden=self._hidden,
            inner=parts.layers[0].down.shape[1],
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            dim=parts.dim,
            layers=len(parts.layers),
            eps=parts.eps,
            embedding=None if tied else self._kept(parts.embedding.contiguous()),
            head=self._packed(parts.lm_head, None),
            norm=self._kept(_wide(parts.norm)),
            cos=self._kept(_wide(parts.cos)),
            sin=self._kept(_wide(parts.sin)),
            layer=ctypes.cast(layers, ctypes.POINTER(Layer)),
        )
        self._layers = layers
        self._opened: int | None = library.open(TYPES[self._dtype], ctypes.byref(self._model))

    def __del__(self) -> None:
        opened, self._opened = getattr(self, "_opened", None), None
        if opened is not None:
            self._library.close(opened)

    @staticmethod
    def fits(parts: DecoderParts) -> bool:
        """Whether the library can run such a model: its widths must be whole lanes."""
        dtype = parts.norm.dtype
        pair = PAIRS.get(dtype, 0)
        widths = (parts.norm.shape[0], parts.layers[0].down.shape[1], parts.dim)
        return bool(pair) and not any(width % pair for width in widths) and parts.dim <= _MOST_DIM

    def forward(self, tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> Tensor:
        rows = tokens.shape[0]
        out = torch.empty(rows, self._hidden, dtype=self._dtype)
        given = (Group * len(groups))(*(_group(group) for group in groups))
        self._library.forward(
            self._opened,
            rows,
            tokens.data_ptr(),
            positions.data_ptr(),
            given,
            len(groups),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self._vocab, dtype=torch.float32)
        self._library.logits(
            self._opened, hidden.shape[0], hidden.data_ptr(), out.data_ptr(), torch.get_num_threads()
        )
        return out

    def _layer(self, parts: LayerParts) -> Layer:
        return Layer(
            qkv=self._packed(parts.qkv, parts.qkv_bias),
            o=self._packed(parts.o, parts.o_bias),
            gate_up=self._packed(parts.gate_up, parts.gate_up_bias, pair_halves=True),
            down=self._packed(parts.down, parts.down_bias),
            attention_norm=self._kept(_wide(parts.attention_norm)),
            mlp_norm=self._kept(_wide(parts.mlp_norm)),
            q_norm=None if parts.q_norm is None else self._kept(_wide(parts.q_norm)),
            k_norm=None if parts.k_norm is None else self._kept(_wide(parts.k_norm)),
            group=parts.group,
            index=parts.index,
            rotary=parts.rotary,
        )

    def _packed(self, weight: Tensor, bias: Tensor | None, pair_halves: bool = False) -> ctypes.Structure:
        packed = PackedMatrix(self._library, weight, bias, pair_halves, self._arena)
        self._keep.append(packed)
        return packed.matrix

    def _kept(self, tensor: Tensor) -> int | None:
        self._keep.append(tensor)
        return address(tensor)


def _group(group: StepGroup) -> Group:
    attention, storage = group.attention, group.storage
    if not isinstance(attention, CpuAttention):
        raise TypeError("attention was laid out by another backend")
    kv = pages_of(storage[:, 0])
    return Group(
        storage.data_ptr(),
        storage.stride(0),
        storage.stride(1),
        group.slots.data_ptr(),
        attention.plan,
        kv.slots,
        kv.type,
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()


def _sizes(parts: DecoderParts) -> Sequence[int]:
    sizes = [packed_bytes(parts.lm_head)]
    for layer in parts.layers:
        sizes += [packed_bytes(weight) for weight in (layer.qkv, layer.o, layer.down)]
        sizes.append(packed_bytes(layer.gate_up, pair_halves=True))
    return sizes
