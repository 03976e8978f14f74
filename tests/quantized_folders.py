"""Small Hugging Face folders in FP8, AWQ, GPTQ and compressed-tensors, with the numbers that they stand for.

Everything is written and computed in plain numpy from what the formats' own projects say of them: nothing of
the loader is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from agentserve.models.hf_config import hf_config
from agentserve.models.weights import layout

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder's tensors, its config, and the numbers `[out, in]` of its quantised matrices."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    numbers: Mapping[str, Floats]

    def write(self, path: Path, shards: int = 1) -> Path:
        """As files; with more than one shard a matrix's tensors lie in different ones."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        if shards == 1:
            save_file(self.tensors, path / "model.safetensors")
            return path
        where = {name: f"model-{at % shards}.safetensors" for at, name in enumerate(sorted(self.tensors))}
        for shard in set(where.values()):
            save_file({name: self.tensors[name] for name in where if where[name] == shard}, path / shard)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return path

    def changed(self, **tensors: Tensor | None) -> Folder:
        """With other tensors (None: without), by their names with `__` for a dot."""
        found = dict(self.tensors)
        for name, tensor in tensors.items():
            name = name.replace("__", ".")
            if tensor is None:
                del found[name]
            else:
                found[name] = tensor
        return replace(self, tensors=found)

    def told(self, **settings: Any) -> Folder:
        """With other settings in `quantization_config`."""
        told = self.config["quantization_config"] | settings
        return replace(self, config=self.config | {"quantization_config": told})


Matrix = Callable[[np.random.Generator, int, int], tuple[dict[str, Tensor], Floats]]
"""The tensors of one matrix `[out, in]`, by what stands behind its name, and its numbers."""


def folder(quantization: dict[str, Any], matrix: Matrix, head: bool = False, seed: int = 0) -> Folder:
    """A model whose layers' matrices are all quantised, and with `head` the head, too."""
    rng = np.random.default_rng(seed)
    config = CONFIG | {"quantization_config": quantization}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Floats] = {}
    for part in layout(hf_config(CONFIG, "config")):
        quantised = "proj.weight" in part.name or (head and part.name == "lm_head.weight")
        if not quantised:
            values = rng.normal(0, 0.3, part.shape) + ("norm" in part.name)
            tensors[part.name] = torch.from_numpy(values).to(torch.float16)
            continue
        module = part.name.removesuffix(".weight")
        stored, numbers[part.name] = matrix(rng, *part.shape)
        tensors |= {f"{module}.{kind}": tensor for kind, tensor in stored.items()}
    return Folder(config, tensors, numbers)


def fp8(scaling: str, scale_name: str, scale_dtype: torch.dtype = torch.float32) -> Matrix:
    """`scaling`: "tensor", "row", or the rows and columns of a block ("24x32")."""

    def made(rng: np.random.Generator, out: int, inputs: int) -> tuple[dict[str, Tensor], Floats]:
        codes = rng.integers(0, 256, (out, inputs))
        codes[codes % 128 == 127] -= 1  # NaN
        height, width = {"tensor": (out, inputs), "row": (1, inputs)}.get(scaling) or (
            int(size) for size in scaling.split("x")
        )
        shape = (-(-out // height), -(-inputs // width))
        scales = torch.from_numpy(rng.uniform(0.0002, 0.0006, shape)).to(scale_dtype)
        wide = scales.to(torch.float32).numpy()
        rows, columns = np.arange(out)[:, None] // height, np.arange(inputs)[None, :] // width
        numbers = fp8_numbers(codes) * wide[rows, columns]
        stored = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
        given = scales.reshape(()) if scaling == "tensor" else scales
        return {"weight": stored, scale_name: given}, numbers

    return made


def fp8_numbers(codes: Ints) -> Floats:
    """e4m3: a sign, four bits of exponent (less 7) and three of mantissa; exponent 0 is without leading 1."""
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    small = mantissa / 8 * 2.0**-6
    large = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return (sign * np.where(exponent == 0, small, large)).astype(np.float32)


def awq(group: int) -> Matrix:
    def made(rng: np.random.Generator, out: int, inputs: int) -> tuple[dict[str, Tensor], Floats]:
        codes, zeros, scales, groups = _four_bits(rng, out, inputs, group)
        stored = {
            "qweight": words(codes.T, AWQ_ORDER),
            "qzeros": words(zeros, AWQ_ORDER),
            "scales": torch.from_numpy(scales),
        }
        return stored, _numbers(codes, zeros, scales, groups)

    return made


def gptq(
    group: int, version: int = 1, order: str = "none", with_index: bool = True, lowest: int = 1
) -> Matrix:
    """`order`: "none"; "shared", act-order that is the same for all matrices of a width; "own", for each
    another; "uneven", groups of unequal sizes. Zeros are from `lowest` on."""

    def made(rng: np.random.Generator, out: int, inputs: int) -> tuple[dict[str, Tensor], Floats]:
        codes, zeros, scales, groups = _four_bits(rng, out, inputs, group, lowest)
        if order == "shared":
            groups = np.random.default_rng(inputs).permutation(groups)
        elif order == "own":
            groups = rng.permutation(groups)
        elif order == "uneven":
            groups = rng.integers(0, groups.max() + 1, inputs)
        stored = {
            "qweight": words(codes, range(8)).t().contiguous(),
            "qzeros": words(zeros, range(8)),
            "scales": torch.from_numpy(scales),
        }
        if version == 1:
            stored["qzeros"] = stored["qzeros"] - 0x11111111
        if with_index:
            stored["g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return stored, _numbers(codes, zeros, scales, groups)

    return made


def packed(group: int, symmetric: bool, ordered: bool = False) -> Matrix:
    """compressed-tensors' "pack-quantized"."""

    def made(rng: np.random.Generator, out: int, inputs: int) -> tuple[dict[str, Tensor], Floats]:
        codes, zeros, scales, groups = _four_bits(rng, out, inputs, group)
        if symmetric:
            zeros = np.full_like(zeros, 8)
        if ordered:
            groups = np.random.default_rng(inputs).permutation(groups)
        stored = {
            "weight_packed": words(codes, range(8)),
            "weight_scale": torch.from_numpy(scales.T.copy()).to(torch.bfloat16),
            "weight_shape": torch.tensor([out, inputs]),
        }
        if not symmetric:
            stored["weight_zero_point"] = words(zeros, range(8)).t().contiguous()
        if ordered:
            stored["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        wide = stored["weight_scale"].to(torch.float32).numpy().T
        return stored, _numbers(codes, zeros, wide, groups)

    return made


def words(codes: Ints, order: Any) -> Tensor:
    """`[rows, n]` -> `[rows, n / 8]` int32; the i-th four bits of a word are the code `order[i]` of eight."""
    eights = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32)
    found = np.zeros(eights.shape[:2], np.uint32)
    for place, column in enumerate(order):
        found |= eights[:, :, column] << np.uint32(4 * place)
    return torch.from_numpy(found.view(np.int32))


def _four_bits(
    rng: np.random.Generator, out: int, inputs: int, group: int, lowest: int = 0
) -> tuple[Ints, Ints, Floats, Ints]:
    size = inputs if group == -1 else group
    count = -(-inputs // size)
    codes = rng.integers(0, 16, (out, inputs))
    zeros = rng.integers(lowest, 16, (count, out))
    scales = rng.uniform(0.004, 0.012, (count, out)).astype(np.float16)
    return codes, zeros, scales, np.arange(inputs) // size


def _numbers(codes: Ints, zeros: Ints, scales: npt.NDArray[Any], groups: Ints) -> Floats:
    found: Floats = (codes - zeros[groups].T).astype(np.float32) * scales[groups].T.astype(np.float32)
    return found


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' `quantization_config` with one group for all linear modules."""
    scheme = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return config | {"config_groups": {"group_0": scheme}, "kv_cache_scheme": None}


EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
FOUR = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}

KINDS: Mapping[str, tuple[dict[str, Any], Matrix, str]] = {
    "fp8-blocks": (FP8 | {"weight_block_size": [24, 32]}, fp8("24x32", "weight_scale_inv"), "FP8-32"),
    "fp8-tensors": (
        FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8("tensor", "weight_scale"),
        "FP8",
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8("row", "weight_scale"), "FP8"),
    "compressed-tensors-rows": (
        compressed("float-quantized", strategy="channel", **EIGHT),
        fp8("row", "weight_scale", torch.bfloat16),
        "FP8",
    ),
    "compressed-tensors-blocks": (
        compressed("float-quantized", strategy="block", block_structure=[16, 32], **EIGHT),
        fp8("16x32", "weight_scale", torch.bfloat16),
        "FP8-32",
    ),
    "compressed-tensors-4": (
        compressed("pack-quantized", symmetric=True, **FOUR),
        packed(32, symmetric=True),
        "INT4-32",
    ),
    "compressed-tensors-4-zeros": (
        compressed("pack-quantized", symmetric=False, actorder="group", **FOUR),
        packed(32, symmetric=False, ordered=True),
        "INT4-32",
    ),
    "awq": (AWQ, awq(32), "INT4-32"),
    "awq-whole": (AWQ | {"group_size": -1}, awq(-1), "INT4"),
    "gptq": (GPTQ, gptq(32), "INT4-32"),
    "gptq-zeros-of-0": (GPTQ, gptq(32, lowest=0), "INT4-32"),
    "gptq-without-index": (GPTQ, gptq(32, with_index=False), "INT4-32"),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(32, version=2), "INT4-32"),
    "gptq-act-order": (GPTQ | {"desc_act": True}, gptq(32, order="shared"), "INT4-32"),
}
"""Folders by name: `quantization_config`, how matrices are written, the format that they are kept in."""
