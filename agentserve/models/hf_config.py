"""`DecoderConfig` from a Hugging Face `config.json`, old (`rope_scaling`) and new (`rope_parameters`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentserve.models.config import DecoderConfig, RopeConfig, RopeKind
from agentserve.models.errors import ModelError
from agentserve.models.fields import MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH, Fields
from agentserve.models.quantization import quantization_of


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes in its code rather than in its config file."""

    theta: float = 10_000.0  # where the file names none
    qk_norm: bool = False
    fixed_qkv_bias: bool | None = None  # None: `attention_bias` decides
    o_bias: bool = True  # may have one, if `attention_bias` says so
    mlp_bias: bool = True  # may have one, if `mlp_bias` says so
    head_dim: int | None = None  # where the file names none; None: hidden_size / heads
    tied: bool = False  # where the file does not say
    kv_heads: int | None = None  # where the file names none; None: as many as heads


_FAMILIES = {
    "LlamaForCausalLM": ("llama", _Family()),
    "MistralForCausalLM": (
        "mistral",
        _Family(fixed_qkv_bias=False, o_bias=False, mlp_bias=False, kv_heads=8),
    ),
    "Qwen2ForCausalLM": ("qwen2", _Family(fixed_qkv_bias=True, o_bias=False, mlp_bias=False)),
    "Qwen3ForCausalLM": ("qwen3", _Family(qk_norm=True, mlp_bias=False, head_dim=128)),
    "SmolLM3ForCausalLM": ("smollm3", _Family(theta=2_000_000.0, tied=True)),
}


def read_hf_config(path: Path) -> DecoderConfig:
    """Read `config.json` at `path`; anything unsupported in it is a `ModelError`."""
    return hf_config(read_values(path), str(path))


def read_values(path: Path) -> Mapping[str, object]:
    """The JSON object at `path`, or a `ModelError`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return values


def hf_config(values: Mapping[str, object], place: str) -> DecoderConfig:
    """The config told by the parsed JSON `values`; `place` goes into errors."""
    fields = Fields(values, place)
    name = _architecture(fields)
    if name not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"{place}: architecture {name} is not supported (supported: {known})")
    architecture, family = _FAMILIES[name]
    _refuse_unsupported(fields)
    layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    heads = fields.size("num_attention_heads", most=MAX_WIDTH)
    hidden = fields.size("hidden_size", most=MAX_WIDTH)
    attention_bias = fields.flag("attention_bias", False)
    head_dim = fields.size("head_dim", family.head_dim or max(1, hidden // heads), most=MAX_WIDTH)
    max_position = fields.size("max_position_embeddings", most=MAX_POSITIONS)
    config = DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size", most=MAX_WIDTH),
        layers=layers,
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", family.kv_heads or heads, most=MAX_WIDTH),
        head_dim=head_dim,
        vocab_size=fields.size("vocab_size", most=MAX_VOCABULARY),
        rms_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=_rope(fields, family.theta, max_position),
        max_position=max_position,
        tie_embeddings=fields.flag("tie_word_embeddings", family.tied),
        windows=_windows(fields, architecture, layers),
        rotary=_rotary(fields, architecture, layers),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.fixed_qkv_bias is None else family.fixed_qkv_bias,
        o_bias=attention_bias and family.o_bias,
        mlp_bias=fields.flag("mlp_bias", False) and family.mlp_bias,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
    return config.check(place)


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    raise fields.error("architectures", "must be a list of one name")


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"{activation!r} is not supported, only 'silu'")
    quantization_of(fields.values, fields.place)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "other than 1 is not supported")
    if fields.size("pretraining_tp", 1) != 1:
        raise fields.error("pretraining_tp", "other than 1 is not supported")


def _rope(fields: Fields, default_theta: float, max_position: int) -> RopeConfig:
    theta = fields.positive("rope_theta", default_theta)
    part = fields.part("rope_scaling") or fields.part("rope_parameters")
    if part is None:
        return RopeConfig(theta)
    theta = part.positive("rope_theta", theta)
    kind = part.text("rope_type", part.text("type", "default"))
    if kind not in {known.value for known in RopeKind}:
        raise part.error("rope_type", f"{kind!r} is not supported")
    if part.number("partial_rotary_factor", 1.0) != 1.0:
        raise part.error("partial_rotary_factor", "other than 1 is not supported")
    trained = fields.optional_size("original_max_position_embeddings") or part.size(
        "original_max_position_embeddings", max_position
    )
    match RopeKind(kind):
        case RopeKind.DEFAULT:
            return RopeConfig(theta)
        case RopeKind.LINEAR:
            return RopeConfig(theta, RopeKind.LINEAR, factor=part.positive("factor"))
        case RopeKind.LLAMA3:
            return RopeConfig(
                theta,
                RopeKind.LLAMA3,
                factor=part.positive("factor"),
                original_max_position=trained,
                low_freq_factor=part.positive("low_freq_factor"),
                high_freq_factor=part.positive("high_freq_factor"),
            )
        case RopeKind.YARN:
            factor = part.positive("factor", max_position / trained)
            return RopeConfig(
                theta,
                RopeKind.YARN,
                factor=factor,
                original_max_position=trained,
                beta_fast=part.positive("beta_fast", 32.0),
                beta_slow=part.positive("beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(part, factor),
                truncate=part.flag("truncate", True),
            )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN sharpens attention for a context stretched `factor` times (paper, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(part: Fields, factor: float) -> float:
    given = part.optional_number("attention_factor")
    if given is not None:
        return given
    mscale, all_dim = part.optional_number("mscale"), part.optional_number("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def _windows(fields: Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    if architecture == "llama":
        return (None,) * layers
    if architecture == "mistral":
        # Absent means 4096 to transformers, null means none: a difference only this key has.
        window = 4096 if "sliding_window" not in fields.values else fields.optional_size("sliding_window")
        return (window,) * layers
    window = fields.optional_size("sliding_window") if fields.flag("use_sliding_window", False) else None
    kinds = fields.items("layer_types", layers)
    if window is None:
        return (None,) * layers
    if kinds is None:
        if architecture == "smollm3":
            return tuple(None if rotary else window for rotary in _rotary(fields, architecture, layers))
        # The families' own default in transformers, and each file of theirs names it.
        first = int(fields.number("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(layers))
    for kind in kinds:
        if kind not in {"full_attention", "sliding_attention"}:
            raise fields.error("layer_types", f"{kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rotary(fields: Fields, architecture: str, layers: int) -> tuple[bool, ...]:
    if architecture != "smollm3":
        return (True,) * layers
    flags = fields.items("no_rope_layers", layers)  # named the wrong way round: 1 means "rotates"
    if flags is None:
        interval = fields.size("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    return tuple(bool(flag) for flag in flags)
