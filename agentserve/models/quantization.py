"""How a Hugging Face folder stores quantised matrices: `quantization_config` of its `config.json`.

Only weights are read in fewer bits: whatever a config says of activations or KV is for engines that round
those, too; here operands stay in the model's dtype, which is at least as exact. Which matrices are quantised
is read from the tensors themselves, so lists of what was left out (`modules_to_not_convert`, `ignore`) are
not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from agentserve.models.fields import MAX_WIDTH, Fields

_KEY = "quantization_config"
_BITS = 4

Packing = Literal["fp8", "awq", "gptq", "packed"]
"""Which tensors stand for a matrix `X.weight [out, in]`:

"fp8": `X.weight` in float8_e4m3fn with `X.weight_scale` or `X.weight_scale_inv`;
"awq": `X.qweight [in, out / 8]`, `X.qzeros [groups, out / 8]`, `X.scales [groups, out]`;
"gptq": `X.qweight [in / 8, out]`, `X.qzeros`, `X.scales`, `X.g_idx [in]` (each input's group);
"packed" (compressed-tensors): `X.weight_packed [out, in / 8]`, `X.weight_scale [out, groups]`, and where
there are zeros or an order `X.weight_zero_point [out / 8, groups]`, `X.weight_g_idx`.
"""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config says of its quantised matrices."""

    packing: Packing
    block: tuple[int, int] | None = None  # "fp8": outputs and inputs that share a scale, if blocks do
    group: int | None = None  # 4 bits: inputs that share a scale; None: all of them
    less_one: bool = False  # "gptq": zeros are stored less one, as the first version of the format has it
    ordered: bool = False  # "gptq": groups need not be neighbours (act-order), `g_idx` must be there
    symmetric: bool = False  # "packed": no zeros are stored, all are 8


def quantization_of(values: Mapping[str, object], place: str) -> Quantization | None:
    """What the parsed `config.json` says; None where nothing is quantised. `place` goes into errors.

    A `ModelError` for what is not supported, as far as the config tells.
    """
    fields = Fields(values, place)
    part = fields.part(_KEY)
    if part is None:
        return None
    if not part.has("quant_method"):
        raise fields.error(_KEY, "is not supported: it names no quant_method")
    method = part.text("quant_method")
    match method:
        case "fp8":
            return _fp8(part)
        case "fbgemm_fp8":
            return Quantization("fp8")
        case "awq":
            return _awq(part)
        case "gptq":
            return _gptq(part)
        case "compressed-tensors":
            return _compressed(part)
    known = "awq, compressed-tensors, fbgemm_fp8, fp8, gptq"
    raise part.error("quant_method", f"{method!r} is not supported (supported: {known})")


def _fp8(part: Fields) -> Quantization:
    form = part.text("fmt", "e4m3")
    if form != "e4m3":
        raise part.error("fmt", f"{form!r} is not supported, only 'e4m3'")
    return Quantization("fp8", block=_block(part, "weight_block_size"))


def _awq(part: Fields) -> Quantization:
    _four_bits(part, "bits" if part.has("bits") else "w_bit")
    key = "format" if part.has("format") else "version"
    form = part.text(key, "gemm").lower()
    if form != "gemm":
        raise part.error(key, f"{form!r} is not supported, only 'gemm'")
    if not part.flag("zero_point", True):
        raise part.error("zero_point", "false is not supported")
    return Quantization("awq", group=_group(part, "group_size" if part.has("group_size") else "q_group_size"))


def _gptq(part: Fields) -> Quantization:
    _four_bits(part, "bits")
    key = "checkpoint_format" if part.has("checkpoint_format") else "format"
    form = "marlin" if part.flag("is_marlin_format", False) else part.text(key, "gptq")
    if form not in {"gptq", "gptq_v2"}:
        raise part.error(key, f"{form!r} is not supported, only 'gptq' and 'gptq_v2'")
    ordered = part.flag("desc_act", False)
    return Quantization("gptq", group=_group(part, "group_size"), less_one=form == "gptq", ordered=ordered)


def _compressed(part: Fields) -> Quantization:
    for key in ("transform_config", "sparsity_config"):
        given = part.part(key)
        if given is not None and given.values and given.text("format", "") != "dense":
            raise part.error(key, "is not supported")
    groups = part.part("config_groups")
    if groups is None or not groups.values:
        raise part.error("config_groups", "is missing")
    schemes: set[Quantization] = set()
    for name in groups.values:
        group = groups.part(name)
        weights = group.part("weights") if group is not None else None
        if group is None or weights is None:
            raise groups.error(name, "quantises no weights: not supported")
        form = group.text("format", part.text("format", ""))
        schemes.add(_scheme(group, weights, form))
    if len(schemes) > 1:
        raise part.error("config_groups", "store weights in more than one way: not supported")
    return schemes.pop()


def _scheme(group: Fields, weights: Fields, form: str) -> Quantization:
    kind, bits = weights.text("type", "int"), weights.size("num_bits", 8)
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "tensor")
    if form in {"float-quantized", "naive-quantized"} and (kind, bits) == ("float", 8):
        if strategy in {"tensor", "channel"}:
            return Quantization("fp8")
        if strategy == "block":
            return Quantization("fp8", block=_block(weights, "block_structure"))
        raise weights.error("strategy", f"{strategy!r} is not supported for FP8")
    if form == "pack-quantized" and (kind, bits) == ("int", _BITS):
        symmetric = weights.flag("symmetric", True)
        if strategy == "group":
            return Quantization("packed", group=_group(weights, "group_size"), symmetric=symmetric)
        if strategy == "channel":
            return Quantization("packed", symmetric=symmetric)
        raise weights.error("strategy", f"{strategy!r} is not supported for 4 bits")
    supported = "'float-quantized' of 8 bits, 'pack-quantized' of 4"
    raise group.error("weights", f"{kind} of {bits} bits in {form!r} are not supported, only {supported}")


def _four_bits(part: Fields, key: str) -> None:
    bits = part.size(key)
    if bits != _BITS:
        raise part.error(key, f"{bits} is not supported, only {_BITS}")


def _group(part: Fields, key: str) -> int | None:
    if part.values.get(key) == -1:
        return None
    size = part.size(key, most=MAX_WIDTH)
    if size % 32:
        raise part.error(key, f"{size} is not supported: it must be a multiple of 32, or -1")
    return size


def _block(part: Fields, key: str) -> tuple[int, int] | None:
    value = part.values.get(key)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(type(size) is not int or not 0 < size <= MAX_WIDTH for size in value)
    ):
        raise part.error(key, "must be two whole numbers of at least 1")
    rows, columns = value
    if columns % 32:
        raise part.error(key, f"{columns} inputs are not supported: they must be a multiple of 32")
    return rows, columns
