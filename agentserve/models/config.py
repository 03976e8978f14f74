"""What a decoder-only model looks like: one frozen description for every supported architecture.

`hf_config` and `gguf_config` build it from files; the decoder and the loaders read nothing else.
No torch here: the API process and the simulator read it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from agentserve.models.errors import ModelError


class RopeKind(Enum):
    """How rotary frequencies are stretched beyond the trained context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the whole head dimension, halves rotated against each other.

    `attention_factor` multiplies cos and sin (YaRN only). Fields that a kind does not use keep
    their defaults.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same memory law: one page table for all of them."""

    name: str
    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer: RMS norm, rotary GQA attention, SwiGLU.

    Sizes in elements; `windows[i]` is layer i's sliding window in tokens, itself included (None:
    attends to everything); `rotary[i]` says whether layer i rotates Q and K.
    """

    architecture: str  # "llama", "mistral", "qwen2", "qwen3", "smollm3"
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The KV groups: full attention first, then each sliding window from the widest."""
        by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            by_window.setdefault(window, []).append(layer)
        order = sorted(by_window, key=lambda window: (window is not None, -(window or 0)))
        return tuple(
            LayerGroup("full" if window is None else f"window-{window}", tuple(by_window[window]), window)
            for window in order
        )

    def check(self, place: str) -> DecoderConfig:
        """Return self if its parts fit together, else raise a `ModelError` that names `place`."""
        problems = {
            f"{self.heads} heads are no multiple of {self.kv_heads} KV heads": self.heads % self.kv_heads
            != 0,
            f"head_dim {self.head_dim} is odd": self.head_dim % 2 != 0,
            "YaRN needs a rotary theta above 1": self.rope.kind is RopeKind.YARN and self.rope.theta <= 1,
            "windows and layers differ in number": len(self.windows) != self.layers,
            "rotary flags and layers differ in number": len(self.rotary) != self.layers,
            f"an EOS id lies outside the vocabulary of {self.vocab_size}": any(
                token >= self.vocab_size for token in self.eos_token_ids
            ),
        }
        for problem, present in problems.items():
            if present:
                raise ModelError(f"{place}: {problem}")
        return self
