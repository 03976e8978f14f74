"""A decoder's weights in the layout the kernels read, and the way from named tensors to it.

Q, K and V are one matrix, gate and up another: one product instead of three or two. A loader
names tensors as Hugging Face does; `Assembler` knows where each goes and what shape it must have,
and copies it straight into the fused matrix, so that no tensor exists twice for long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from agentserve.models.config import DecoderConfig
from agentserve.models.errors import ModelError

_IGNORED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # derived from the config


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Matrices are `[out, in]`, as `torch.nn.functional.linear` takes them."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]: Q, then K, then V
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [hidden, heads * head_dim]
    o_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, then up
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole decoder, all in one dtype. `lm_head` is `embedding` itself where the two are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]
    rope_factors: Tensor | None = None  # [head_dim / 2] float32: inverse frequencies are divided by it

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def parameters(self) -> int:
        """How many numbers the model has; tied ones count once."""
        tensors: list[Tensor | None] = [self.embedding, self.norm]
        tensors += [] if self.lm_head is self.embedding else [self.lm_head]
        for layer in self.layers:
            tensors += [getattr(layer, name) for name in LayerWeights.__slots__]
        return sum(tensor.numel() for tensor in tensors if tensor is not None)


def empty_weights(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Uninitialised weights of the right shapes."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.kv_size
    embedding = new(config.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                attention_norm=new(hidden),
                qkv=new(qkv, hidden),
                qkv_bias=new(qkv) if config.qkv_bias else None,
                q_norm=new(config.head_dim) if config.qk_norm else None,
                k_norm=new(config.head_dim) if config.qk_norm else None,
                o=new(hidden, config.q_size),
                o_bias=new(hidden) if config.o_bias else None,
                mlp_norm=new(hidden),
                gate_up=new(2 * inner, hidden),
                gate_up_bias=new(2 * inner) if config.mlp_bias else None,
                down=new(hidden, inner),
                down_bias=new(hidden) if config.mlp_bias else None,
            )
            for _ in range(config.layers)
        ),
        norm=new(hidden),
        lm_head=embedding if config.tie_embeddings else new(config.vocab_size, hidden),
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
    """Every Hugging Face tensor name with the view of the fused weights that holds it."""
    yield "model.embed_tokens.weight", weights.embedding
    for number, layer in enumerate(weights.layers):
        for name, target in _layer_parts(config, layer):
            if target is not None:
                yield f"model.layers.{number}.{name}", target
    yield "model.norm.weight", weights.norm
    if not config.tie_embeddings:
        yield "lm_head.weight", weights.lm_head


def _layer_parts(config: DecoderConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor | None]]:
    q_end = config.q_size
    k_end = q_end + config.kv_size
    inner = config.intermediate_size

    def rows(tensor: Tensor | None, start: int, end: int) -> Tensor | None:
        return None if tensor is None else tensor[start:end]

    yield "input_layernorm.weight", layer.attention_norm
    for part, start, end in (("q", 0, q_end), ("k", q_end, k_end), ("v", k_end, k_end + config.kv_size)):
        yield f"self_attn.{part}_proj.weight", rows(layer.qkv, start, end)
        yield f"self_attn.{part}_proj.bias", rows(layer.qkv_bias, start, end)
    yield "self_attn.q_norm.weight", layer.q_norm
    yield "self_attn.k_norm.weight", layer.k_norm
    yield "self_attn.o_proj.weight", layer.o
    yield "self_attn.o_proj.bias", layer.o_bias
    yield "post_attention_layernorm.weight", layer.mlp_norm
    for part, start, end in (("gate", 0, inner), ("up", inner, 2 * inner)):
        yield f"mlp.{part}_proj.weight", rows(layer.gate_up, start, end)
        yield f"mlp.{part}_proj.bias", rows(layer.gate_up_bias, start, end)
    yield "mlp.down_proj.weight", layer.down
    yield "mlp.down_proj.bias", layer.down_bias


class Assembler:
    """Takes a model's tensors one by one, in any order, and checks that the set is right.

    All of them are announced by `wants` first; memory is taken by `allocate`, once every tensor that
    the config promises is known to be there: a config alone must not cost memory.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        file_name: Callable[[str], str] = str,
    ) -> None:
        """`file_name` spells a tensor's name as the file does, for errors."""
        self._config = config
        self._file_name = file_name
        self._dtype, self._device = dtype, device
        shapes = empty_weights(config, dtype, torch.device("meta"))
        self._missing = {name: tuple(part.shape) for name, part in named_parts(config, shapes)}
        self._announced: set[str] = set()
        self._weights: DecoderWeights | None = None
        self._empty: dict[str, Tensor] = {}

    def wants(self, name: str, shape: tuple[int, ...], place: str) -> bool:
        """Whether a tensor is to be read; a `ModelError` if it is unknown, repeated or misshapen."""
        tied_head = name == "lm_head.weight" and self._config.tie_embeddings
        if tied_head or _IGNORED.fullmatch(name):
            return False
        if name in self._announced:
            raise ModelError(f"{place}: tensor {self._file_name(name)} is there twice")
        expected, label = self._missing.get(name), self._file_name(name)
        if expected is None:
            raise ModelError(f"{place}: tensor {label} is not part of a {self._config.architecture} model")
        if shape != expected:
            raise ModelError(
                f"{place}: tensor {label} has shape {list(shape)}, the config asks for {list(expected)}"
            )
        del self._missing[name]
        self._announced.add(name)
        return True

    def allocate(self, place: str) -> None:
        """Make room for the tensors, or raise a `ModelError` that names the first missing one."""
        for name in self._missing:
            more = f" (and {len(self._missing) - 1} more)" if len(self._missing) > 1 else ""
            raise ModelError(f"{place}: tensor {self._file_name(name)} is missing{more}")
        self._weights = empty_weights(self._config, self._dtype, self._device)
        self._empty = dict(named_parts(self._config, self._weights))

    def put(self, name: str, values: Tensor) -> None:
        """Copy a tensor that `wants` has accepted into its place."""
        self._empty.pop(name).copy_(values)

    def finish(self, rope_factors: Tensor | None = None) -> DecoderWeights:
        """The weights, every announced tensor put."""
        assert self._weights is not None
        assert not self._empty
        done = self._weights
        if rope_factors is None:
            return done
        return DecoderWeights(done.embedding, done.layers, done.norm, done.lm_head, rope_factors)
