"""`DecoderConfig` from a GGUF file's metadata and tensor names."""

from __future__ import annotations

from collections.abc import Mapping

from agentserve.models.config import DecoderConfig, RopeConfig, RopeKind
from agentserve.models.errors import ModelError
from agentserve.models.fields import MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from agentserve.models.gguf_file import GgufFile, GgufTensor
from agentserve.models.hf_config import yarn_mscale

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
INTERLEAVED = ("llama", "smollm3")
"""Architectures whose GGUF writers interleave the two halves of each rotary pair in Q and K."""


def gguf_config(file: GgufFile) -> DecoderConfig:
    """The config that `file` tells; anything unsupported in it is a `ModelError`."""
    return config_from_metadata(file.metadata(), file.tensors(), str(file.path))


def config_from_metadata(
    metadata: Mapping[str, object], tensors: Mapping[str, GgufTensor], place: str
) -> DecoderConfig:
    general = Fields(metadata, place)
    arch = general.text("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{place}: architecture {arch} is not supported in GGUF (supported: {known})")
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(own, f"{place}: {arch}")
    if fields.has("expert_count") and fields.number("expert_count") > 0:
        raise fields.error("expert_count", "mixture of experts is not supported")
    hidden = fields.size("embedding_length", most=MAX_WIDTH)
    heads = fields.size("attention.head_count", most=MAX_WIDTH)
    layers = fields.size("block_count", most=MAX_LAYERS)
    head_dim = fields.size("attention.key_length", max(1, hidden // heads), most=MAX_WIDTH)
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", "other than key_length is not supported")
    if fields.size("rope.dimension_count", head_dim) != head_dim:
        raise fields.error("rope.dimension_count", "other than the head dimension is not supported")
    window = fields.optional_size("attention.sliding_window")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{place}: tensor token_embd.weight is missing")
    if len(embedding.shape) != 2:
        raise ModelError(f"{place}: tensor token_embd.weight is no matrix")
    max_position = fields.size("context_length", most=MAX_POSITIONS)
    return DecoderConfig(
        architecture=arch,
        hidden_size=hidden,
        intermediate_size=fields.size("feed_forward_length", most=MAX_WIDTH),
        layers=layers,
        heads=heads,
        kv_heads=fields.size("attention.head_count_kv", heads, most=MAX_WIDTH),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        rms_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, max_position),
        max_position=max_position,
        tie_embeddings="output.weight" not in tensors,
        windows=(window,) * layers,
        # The interval is no metadata: it is fixed in the architecture's code, as in llama.cpp.
        rotary=tuple(arch != "smollm3" or (layer + 1) % 4 != 0 for layer in range(layers)),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        bos_token_id=next(iter(general.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=tuple(
            dict.fromkeys(
                general.token_ids("tokenizer.ggml.eos_token_id")
                + general.token_ids("tokenizer.ggml.eot_token_id")
            )
        ),
    ).check(place)


def _rope(fields: Fields, max_position: int) -> RopeConfig:
    theta = fields.positive("rope.freq_base", 10_000.0)
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    factor = fields.positive("rope.scaling.factor", 1.0)
    if kind == "linear":
        return RopeConfig(theta, RopeKind.LINEAR, factor=factor)
    if kind != "yarn":
        raise fields.error("rope.scaling.type", f"{kind!r} is not supported")
    if fields.number("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        raise fields.error("rope.scaling.yarn_log_multiplier", "is not supported")
    scale = fields.positive("rope.scaling.attn_factor", fields.positive("rope.scaling.yarn_attn_factor", 1.0))
    return RopeConfig(
        theta,
        RopeKind.YARN,
        factor=factor,
        original_max_position=fields.size("rope.scaling.original_context_length", max_position),
        beta_fast=fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.positive("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=scale * yarn_mscale(factor),
    )
