"""A decoder's weights in the layout the kernels read, and which named tensor lies where in it.

Q, K and V are one matrix, gate and up another: one product instead of three or two. Tensors are
named as Hugging Face does. A matrix is a tensor of the decoder's dtype, blocks as a file has them, or codes
with scales beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from agentserve.models.config import DecoderConfig
from kernels.blocks import BlockMatrix, Matrix
from kernels.narrow import GroupedMatrix, ScaledMatrix

TOP = -1
"""The "layer" of what belongs to none: embedding, last norm, head."""

Place = tuple[int, str]
"""A field of the weights: its layer (or `TOP`), and its name in `LayerWeights` or `DecoderWeights`."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Matrices are `[out, in]`, as `torch.nn.functional.linear` takes them."""

    attention_norm: Tensor  # [hidden]
    qkv: Matrix  # [(heads + 2 * kv_heads) * head_dim, hidden]: Q, then K, then V
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Matrix  # [hidden, heads * head_dim]
    o_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Matrix  # [2 * intermediate, hidden]: gate, then up
    gate_up_bias: Tensor | None
    down: Matrix  # [hidden, intermediate]
    down_bias: Tensor | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole decoder that computes in `dtype`, which all its tensors have.

    `lm_head` is `embedding` itself where the two are tied, or a rank's part of the same memory.
    """

    dtype: torch.dtype
    embedding: Matrix  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Matrix  # [vocab, hidden]
    rope_factors: Tensor | None = None  # [head_dim / 2] float32: inverse frequencies are divided by it

    @property
    def parameters(self) -> int:
        """How many numbers the model has; tied ones count once."""
        return sum(part.numel() for part in self._all())

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, blocks as they are."""
        return sum(part.nbytes for part in self._all())

    @property
    def nbytes_in_blocks(self) -> int:
        """Bytes of those that are in blocks."""
        return sum(part.nbytes for part in self._all() if isinstance(part, BlockMatrix))

    @property
    def step_bytes(self) -> int:
        """Bytes that every step reads at least: all but an embedding that is not the head too."""
        return self.nbytes - self.embedding.nbytes + (self.lm_head.nbytes if self._tied else 0)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of the matrices kept quantised, the one with most weights first; empty: none are."""
        counts: dict[str, int] = {}
        for part in self._all():
            if isinstance(part, ScaledMatrix | GroupedMatrix):
                counts[part.format] = counts.get(part.format, 0) + part.numel()
            for run in part.runs if isinstance(part, BlockMatrix) else ():
                name = run.format.name
                counts[name] = counts.get(name, 0) + run.data.shape[0] * part.shape[1]
        return tuple(sorted(counts, key=lambda name: (-counts[name], name)))

    @property
    def layers_in_blocks(self) -> bool:
        """Whether any layer has a matrix in blocks."""
        return any(isinstance(matrix, BlockMatrix) for layer in self.layers for matrix in layer.matrices)

    @property
    def _tied(self) -> bool:
        return self.lm_head is self.embedding or _shared(self.lm_head, self.embedding)

    def _all(self) -> Iterator[Matrix]:
        yield self.embedding
        yield self.norm
        if not self._tied:
            yield self.lm_head
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                part = getattr(layer, name)
                if part is not None:
                    yield part


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a model: its Hugging Face name, and the rows of a field that it is."""

    name: str
    place: Place
    row: int  # its first one in the field
    shape: tuple[int, ...]


def layout(config: DecoderConfig) -> Iterator[Part]:
    """Every tensor that a model of this config has, fields in a fixed order and each without gaps."""
    embedding = (config.vocab_size, config.hidden_size)
    yield Part("model.embed_tokens.weight", (TOP, "embedding"), 0, embedding)
    for layer in range(config.layers):
        yield from _layer_layout(config, layer)
    yield Part("model.norm.weight", (TOP, "norm"), 0, (config.hidden_size,))
    if not config.tie_embeddings:
        yield Part("lm_head.weight", (TOP, "lm_head"), 0, embedding)


def _layer_layout(config: DecoderConfig, layer: int) -> Iterator[Part]:
    prefix = f"model.layers.{layer}."
    q, kv, hidden, inner = config.q_size, config.kv_size, config.hidden_size, config.intermediate_size

    def norm(name: str, field: str, size: int) -> Part:
        return Part(f"{prefix}{name}.weight", (layer, field), 0, (size,))

    def product(field: str, width: int, biased: bool, **pieces: int) -> Iterator[Part]:
        """Matrices of `width` beneath each other, named with two underscores for a dot."""
        row = 0
        for piece, rows in pieces.items():
            name = prefix + piece.replace("__", ".")
            yield Part(f"{name}.weight", (layer, field), row, (rows, width))
            if biased:
                yield Part(f"{name}.bias", (layer, f"{field}_bias"), row, (rows,))
            row += rows

    yield norm("input_layernorm", "attention_norm", hidden)
    qkv = {"self_attn__q_proj": q, "self_attn__k_proj": kv, "self_attn__v_proj": kv}
    yield from product("qkv", hidden, config.qkv_bias, **qkv)
    if config.qk_norm:
        yield norm("self_attn.q_norm", "q_norm", config.head_dim)
        yield norm("self_attn.k_norm", "k_norm", config.head_dim)
    yield from product("o", q, config.o_bias, self_attn__o_proj=hidden)
    yield norm("post_attention_layernorm", "mlp_norm", hidden)
    yield from product("gate_up", hidden, config.mlp_bias, mlp__gate_proj=inner, mlp__up_proj=inner)
    yield from product("down", inner, config.mlp_bias, mlp__down_proj=hidden)


def parameter_count(config: DecoderConfig) -> int:
    """How many numbers a whole model of this config has; tied ones count once."""
    return sum(prod(part.shape) for part in layout(config))


def field_shapes(config: DecoderConfig) -> dict[Place, tuple[int, ...]]:
    """The shape of every field that is there."""
    shapes: dict[Place, tuple[int, ...]] = {}
    for part in layout(config):
        shapes[part.place] = (part.row + part.shape[0], *part.shape[1:])
    return shapes


def weights_of(
    config: DecoderConfig,
    dtype: torch.dtype,
    fields: Mapping[Place, Matrix],
    rope_factors: Tensor | None = None,
) -> DecoderWeights:
    """The weights out of their fields, all of `field_shapes(config)`."""

    def tensor(layer: int, name: str) -> Tensor:
        field = fields[layer, name]
        assert isinstance(field, Tensor), name
        return field

    def optional(layer: int, name: str) -> Tensor | None:
        return tensor(layer, name) if (layer, name) in fields else None

    embedding = fields[TOP, "embedding"]
    return DecoderWeights(
        dtype=dtype,
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                attention_norm=tensor(layer, "attention_norm"),
                qkv=fields[layer, "qkv"],
                qkv_bias=optional(layer, "qkv_bias"),
                q_norm=optional(layer, "q_norm"),
                k_norm=optional(layer, "k_norm"),
                o=fields[layer, "o"],
                o_bias=optional(layer, "o_bias"),
                mlp_norm=tensor(layer, "mlp_norm"),
                gate_up=fields[layer, "gate_up"],
                gate_up_bias=optional(layer, "gate_up_bias"),
                down=fields[layer, "down"],
                down_bias=optional(layer, "down_bias"),
            )
            for layer in range(config.layers)
        ),
        norm=tensor(TOP, "norm"),
        lm_head=embedding if config.tie_embeddings else fields[TOP, "lm_head"],
        rope_factors=rope_factors,
    )


def empty_weights(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Uninitialised tensors of the right shapes."""
    shapes = field_shapes(config).items()
    return weights_of(
        config, dtype, {place: torch.empty(shape, dtype=dtype, device=device) for place, shape in shapes}
    )


def random_weights(
    config: DecoderConfig, seed: int, std: float = 0.05, dtype: torch.dtype = torch.float32
) -> DecoderWeights:
    """Normal weights of deviation `std`, norms around 1; the same for one (config, seed) everywhere.

    Drawn in float32 on the CPU and then rounded, so that bfloat16 weights are those of float32.
    """
    weights = empty_weights(config, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for name, target in named_parts(config, weights):
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        target.copy_(torch.randn(target.shape, generator=generator) * std + centre)
    return weights


def named_parts(config: DecoderConfig, weights: DecoderWeights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor's name with the view of the fused weights that holds it; TypeError for quantised ones."""
    for part in layout(config):
        layer, name = part.place
        field = getattr(weights if layer == TOP else weights.layers[layer], name)
        if not isinstance(field, Tensor):
            raise TypeError(f"{part.name} is in blocks or codes: there is no view of its numbers")
        yield part.name, field[part.row : part.row + part.shape[0]]


def _shared(one: Matrix, other: Matrix) -> bool:
    """Whether they lie in the same memory."""
    places = [_memory(matrix).untyped_storage().data_ptr() for matrix in (one, other)]
    return places[0] == places[1] != 0


def _memory(matrix: Matrix) -> Tensor:
    if isinstance(matrix, Tensor):
        return matrix
    return matrix.runs[0].data if isinstance(matrix, BlockMatrix) else matrix.codes
