"""Weights out of a GGUF file: un-interleaved, fused; blocks as they are, or de-quantised.

Blocks run along rows, so that undoing the interleaving moves whole rows of bytes: only Q and K of
the Llama family are copied, all other blocks stay in the mapped file.
"""

from __future__ import annotations

import re
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentserve.models.assemble import Assembler
from agentserve.models.config import DecoderConfig
from agentserve.models.errors import ModelError
from agentserve.models.gguf_config import INTERLEAVED
from agentserve.models.gguf_file import GgufFile, GgufTensor
from agentserve.models.shard import WHOLE, Shard
from agentserve.models.weights import DecoderWeights
from kernels.blocks import FORMATS, BlockRows

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_TOP |= {"output.weight": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PARTS = {part: name for name, part in _LAYER.items()}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
Number = TypeVar("Number", np.float32, np.uint8)

_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3 models: per-frequency divisors, computed when the file was made


def load_gguf_weights(
    file: GgufFile,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    stored: bool = False,
    *,
    shard: Shard = WHOLE,
) -> DecoderWeights:
    """Read every tensor of `file`; a missing, foreign, misshapen or unreadable one is a `ModelError`.

    `stored` keeps matrices in blocks whose format the kernels know; on the CPU they stay in the
    mapped file, and the file stays mapped as long as they live.
    """
    place = str(file.path)
    assembler = Assembler(config, dtype, device, gguf_name, shard)
    rope_factors: Tensor | None = None
    wanted: list[tuple[str, GgufTensor]] = []
    for tensor in file.tensors().values():
        if tensor.name == _ROPE_FACTORS:
            rope_factors = _rope_factors(tensor, config)
            continue
        name = hf_name(tensor.name)
        if name is None:
            raise ModelError(f"{place}: tensor {tensor.name} is not part of a {config.architecture} model")
        if assembler.wants(name, tensor.shape, place):
            wanted.append((name, tensor))
    blocks = {name: tensor.kind for name, tensor in wanted if stored and _in_blocks(tensor)}
    assembler.allocate(place, blocks)
    for name, tensor in wanted:
        heads = _interleaved_heads(config, tensor.name)
        if assembler.keeps_blocks(name):
            rows = _ordered(tensor.raw_rows(), heads)
            assembler.put_blocks(name, BlockRows(FORMATS[tensor.kind], torch.from_numpy(rows)))
        else:
            assembler.put(name, torch.from_numpy(_ordered(tensor.values(), heads)))
    return assembler.finish(rope_factors)


def _in_blocks(tensor: GgufTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.kind in FORMATS


def _ordered(values: npt.NDArray[Number], heads: int | None) -> npt.NDArray[Number]:
    """A tensor's rows in the decoder's order."""
    return values if heads is None else split_rotary_pairs(values, heads)


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that a decoder does not have."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor of a decoder: the inverse of `hf_name`."""
    for short, long in _TOP.items():
        if name == long:
            return short
    _, _, layer, rest = name.split(".", 3)
    part, ending = rest.rsplit(".", 1)
    return f"blk.{layer}.{_PARTS[part]}.{ending}"


def split_rotary_pairs(values: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Undo the interleaving of rotary pairs: rows (2i, 2i+1) of each head go to (i, i + head_dim/2).

    GGUF writers of the Llama family order Q's and K's rows for a rotation of neighbours; the
    decoder rotates the first half of a head against the second. Rows may be numbers or bytes.
    """
    pairs = values.shape[0] // heads // 2
    return values.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _interleaved_heads(config: DecoderConfig, name: str) -> int | None:
    if config.architecture not in INTERLEAVED:
        return None
    match = _LAYER_NAME.fullmatch(name)
    part = match[2] if match else ""
    return {"attn_q": config.heads, "attn_k": config.kv_heads}.get(part)


def _rope_factors(tensor: GgufTensor, config: DecoderConfig) -> Tensor:
    expected = (config.head_dim // 2,)
    if tensor.shape != expected:
        raise ModelError(
            f"{tensor.place}: tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(expected)}"
        )
    return torch.from_numpy(np.array(tensor.values(), dtype=np.float32))
