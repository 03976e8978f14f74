"""FP8, AWQ, GPTQ and compressed-tensors folders: their numbers, and what can be wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from agentserve.models.errors import ModelError
from agentserve.models.hf_config import hf_config
from agentserve.models.load import LoadedModel, load_model, weights_digest
from agentserve.models.source import ModelSource
from agentserve.models.weights import TOP, DecoderWeights, layout
from kernels.blocks import Matrix, expand
from kernels.narrow import GroupedMatrix, ScaledMatrix
from tests.quantized_folders import (
    AWQ,
    CONFIG,
    EIGHT,
    FOUR,
    FP8,
    GPTQ,
    KINDS,
    Folder,
    awq,
    compressed,
    folder,
    fp8,
    gptq,
    packed,
)

CPU = torch.device("cpu")
Q, K = "model__layers__0__self_attn__q_proj__", "model__layers__0__self_attn__k_proj__"


def source(path: Path) -> ModelSource:
    return ModelSource("folder", path, "m")


def load(path: Path, dtype: torch.dtype = torch.float32, stored: bool = True) -> LoadedModel:
    return load_model(source(path), dtype, CPU, "stored" if stored else "expanded")


def matrices(weights: DecoderWeights) -> dict[str, tuple[Matrix, int, int]]:
    """By the name of each part of it: the field, and where the part's rows begin and end."""
    found = {}
    for part in layout(hf_config(CONFIG, "config")):
        layer, field = part.place
        matrix = getattr(weights if layer == TOP else weights.layers[layer], field)
        found[part.name] = (matrix, part.row, part.row + part.shape[0])
    return found


def check(weights: DecoderWeights, made: Folder, dtype: torch.dtype = torch.float32) -> None:
    """Every matrix has the folder's numbers, every other tensor its own."""
    for name, (matrix, start, end) in matrices(weights).items():
        if name in made.numbers:
            expected = torch.from_numpy(np.array(made.numbers[name])).to(dtype)
        else:
            expected = made.tensors[name].to(dtype)
        assert torch.equal(expand(matrix, dtype)[start:end], expected), name


def failure(path: Path, made: Folder) -> str:
    made.write(path)
    with pytest.raises(ModelError) as raised:
        load(path)
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text.removeprefix(str(path)).removeprefix("/")


@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    quantization, matrix, form = KINDS[name]
    made = folder(quantization, matrix)
    made.write(tmp_path)
    stored, expanded = load(tmp_path).weights, load(tmp_path, stored=False).weights
    assert stored.formats == (form,)
    assert expanded.formats == ()
    assert not stored.layers_in_blocks
    for layer in stored.layers:
        for kept in layer.matrices:
            assert isinstance(kept, ScaledMatrix | GroupedMatrix)
    check(stored, made)
    check(expanded, made)
    check(load(tmp_path, torch.bfloat16).weights, made, torch.bfloat16)
    assert stored.parameters == expanded.parameters
    assert stored.nbytes < expanded.nbytes / 2
    assert all(abs(values).max() > 0.01 for values in made.numbers.values())


def test_tensors_of_a_matrix_in_several_shards(tmp_path: Path) -> None:
    made = folder(AWQ, awq(32), head=True)
    check(load(made.write(tmp_path, shards=3)).weights, made)


def test_an_oracle_for_blocks_of_fp8(tmp_path: Path) -> None:
    made = folder(FP8 | {"weight_block_size": [24, 32]}, fp8("24x32", "weight_scale_inv"))
    found = matrices(load(made.write(tmp_path)).weights)
    for name in made.numbers:
        scales = made.tensors[f"{name}_scale_inv"]
        theirs = _dequantize_fp8_weight(made.tensors[name], scales, [24, 32], torch.float32)
        matrix, start, end = found[name]
        assert torch.equal(expand(matrix, torch.float32)[start:end], theirs)


def test_groups_of_other_inputs_are_expanded(tmp_path: Path) -> None:
    """Act-order that differs between Q, K and V, groups of unequal sizes: no one matrix holds them."""
    for order, kept in (("own", 2), ("uneven", 0)):
        made = folder(GPTQ | {"desc_act": True}, gptq(32, order=order))
        weights = load(made.write(tmp_path / order)).weights
        check(weights, made)
        for layer in weights.layers:
            narrow = [matrix for matrix in layer.matrices if isinstance(matrix, GroupedMatrix)]
            assert len(narrow) == kept
            assert isinstance(layer.qkv, Tensor)


def test_matrices_that_are_left_out_are_plain(tmp_path: Path) -> None:
    """What is quantised is told by the tensors; a fused matrix with a plain part is expanded."""
    made = folder(AWQ | {"modules_to_not_convert": ["k_proj"]}, awq(32), head=True)
    name = "model.layers.0.self_attn.k_proj.weight"
    gone = {f"{K}{kind}": None for kind in ("qweight", "qzeros", "scales")}
    plain = torch.from_numpy(made.numbers[name]).to(torch.float16)
    left = made.changed(**gone, **{f"{K}weight": plain})
    numbers = {other: values for other, values in made.numbers.items() if other != name}
    left = Folder(left.config, left.tensors, numbers)
    weights = load(left.write(tmp_path)).weights
    check(weights, left)
    assert isinstance(weights.layers[0].qkv, Tensor)
    assert isinstance(weights.layers[1].qkv, GroupedMatrix)
    assert isinstance(weights.lm_head, GroupedMatrix)


def test_scales_of_activations_and_kv_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = folder(FP8 | {"activation_scheme": "static"}, fp8("tensor", "weight_scale"))
    more = made.changed(
        **{f"{Q}input_scale": torch.ones(()), "model__layers__0__self_attn__k_scale": torch.ones(1)}
    )
    caplog.set_level("INFO")
    check(load(more.write(tmp_path)).weights, more)
    assert "2 scales of activations or KV are not used" in caplog.text


def test_biases_of_zero_that_the_model_does_not_have(tmp_path: Path) -> None:
    made = folder(GPTQ, gptq(32))
    o = "model__layers__1__self_attn__o_proj__bias"
    check(load(made.changed(**{o: torch.zeros(64)}).write(tmp_path)).weights, made)
    wrong = failure(tmp_path / "wrong", made.changed(**{o: torch.ones(64)}))
    assert wrong.endswith("o_proj.bias is not zero, and not part of a qwen2 model")
    wrong = failure(tmp_path / "long", made.changed(**{o: torch.zeros(2, 64)}))
    assert wrong.endswith("o_proj.bias has shape [2, 64], the config asks for [64]")
    wrong = failure(tmp_path / "whole", made.changed(**{o: torch.zeros(64, dtype=torch.int32)}))
    assert wrong.endswith("o_proj.bias has dtype I32, not BF16 or F16 or F32")


def test_the_digest_covers_every_tensor(tmp_path: Path) -> None:
    """It names what KV was computed with: a scale, a zero or a group's index makes another model."""
    made = folder(GPTQ | {"desc_act": True}, gptq(32, order="shared"))
    seen = {weights_digest(source(made.write(tmp_path / "0")))}
    for kind in ("qweight", "qzeros", "scales", "g_idx"):
        tensor = made.tensors[f"{Q.replace('__', '.')}{kind}"].clone()
        tensor.view(-1)[0] += 1
        seen.add(weights_digest(source(made.changed(**{Q + kind: tensor}).write(tmp_path / kind))))
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({}, "config.json: quantization_config is not supported: it names no quant_method"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported (supported: awq, "),
        (AWQ | {"bits": 8}, "bits 8 is not supported, only 4"),
        (AWQ | {"version": "GEMV"}, "version 'gemv' is not supported, only 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point false is not supported"),
        (AWQ | {"group_size": 48}, "group_size 48 is not supported: it must be a multiple of 32, or -1"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported, only 4"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"is_marlin_format": True}, "'marlin' is not supported, only 'gptq' and 'gptq_v2'"),
        (GPTQ | {"group_size": 0}, "group_size must be a whole number of at least 1"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported, only 'e4m3'"),
        (FP8 | {"weight_block_size": [128, 48]}, "weight_block_size 48 inputs are not supported"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        (
            compressed("nvfp4-pack-quantized", **EIGHT),
            "float of 8 bits in 'nvfp4-pack-quantized' are not sup",
        ),
        (compressed("int-quantized", num_bits=8, type="int"), "int of 8 bits in 'int-quantized' are not sup"),
        (
            compressed("float-quantized", strategy="group", **EIGHT),
            "strategy 'group' is not supported for FP8",
        ),
        (
            compressed("pack-quantized", strategy="tensor", num_bits=4),
            "strategy 'tensor' is not supported for 4 bits",
        ),
        (compressed("pack-quantized", **FOUR) | {"config_groups": {}}, "config_groups is missing"),
        (
            compressed("pack-quantized", **FOUR) | {"config_groups": {"kv": {"targets": []}}},
            "kv quantises no weights",
        ),
        (
            compressed("pack-quantized", **FOUR) | {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config is not supported",
        ),
        (
            compressed("pack-quantized", **FOUR) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config is not supported",
        ),
    ],
)
def test_configs_that_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as raised:
        hf_config(CONFIG | {"quantization_config": quantization}, "m/config.json")
    assert message in str(raised.value)
    assert str(raised.value).startswith("m/config.json: quantization_config")
    assert "\n" not in str(raised.value)


def test_groups_that_differ_are_refused() -> None:
    config = compressed("pack-quantized", **FOUR)
    other = FOUR | {"group_size": 64}
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"] | {"weights": other}
    with pytest.raises(ModelError, match="store weights in more than one way"):
        hf_config(CONFIG | {"quantization_config": config}, "x")


def grouped_index(value: int) -> Tensor:
    return torch.tensor([0] * 63 + [value], dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("awq", {Q + "scales": None}, ": tensor model.layers.0.self_attn.q_proj.scales is missing"),
        (
            "awq",
            {Q + "qweight": None},
            "q_proj.qzeros has no quantised model.layers.0.self_attn.q_proj.qweight",
        ),
        (
            "awq",
            {Q + kind: None for kind in ("qweight", "qzeros", "scales")},
            ": tensor model.layers.0.self_attn.q_proj.weight is missing",
        ),
        (
            "awq",
            {Q + "qzeros": torch.zeros(4, 8, dtype=torch.int32)},
            "q_proj.qzeros has shape [4, 8], the config asks for [2, 8]",
        ),
        (
            "awq",
            {Q + "qweight": torch.zeros(64, 8, dtype=torch.int16)},
            "q_proj.qweight has dtype I16, not I32",
        ),
        ("awq", {Q + "scales": torch.full((2, 64), torch.inf)}, "q_proj.scales is not finite"),
        ("awq", {Q + "weight": torch.zeros(64, 64)}, "q_proj.weight is there twice"),
        ("awq", {Q + "g_idx": grouped_index(0)}, "q_proj.g_idx is not part of a qwen2 model"),
        ("gptq-act-order", {Q + "g_idx": None}, ": tensor model.layers.0.self_attn.q_proj.g_idx is missing"),
        ("gptq-act-order", {Q + "g_idx": grouped_index(2)}, "q_proj.g_idx names group 2 of 2"),
        ("gptq", {Q + "g_idx": grouped_index(-1)}, "q_proj.g_idx names group -1 of 2"),
        (
            "gptq",
            {Q + "qweight": torch.zeros(16, 64, dtype=torch.int32)},
            "q_proj.qweight has shape [16, 64], the config asks for [8, 64]",
        ),
        (
            "compressed-tensors-4",
            {Q + "weight_shape": torch.tensor([64, 32])},
            "q_proj.weight_shape says [64, 32], the config asks for [64, 64]",
        ),
        ("compressed-tensors-4-zeros", {Q + "weight_zero_point": None}, "weight_zero_point is missing"),
        ("fp8-blocks", {Q + "weight_scale_inv": None}, "q_proj.weight_scale_inv is missing"),
        (
            "fp8-blocks",
            {Q + "weight_scale_inv": torch.ones(2, 2)},
            "weight_scale_inv has shape [2, 2], the config asks for [3, 2]",
        ),
        (
            "fp8-blocks",
            {Q + "weight": torch.full((64, 64), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)},
            "q_proj.weight has NaN in it",
        ),
        (
            "fp8-blocks",
            {Q + "weight": torch.zeros(64, 64)},
            "q_proj.weight_scale_inv has no quantised model.layers.0.self_attn.q_proj.weight",
        ),
        ("fp8-tensors", {Q + "weight_scale": torch.ones(2)}, "has shape [2], the config asks for [64, 1]"),
        (
            "fp8-tensors",
            {Q + "weight_scale_inv": torch.ones(())},
            "weight_scale and weight_scale_inv are both",
        ),
        (
            "fp8-tensors",
            {Q + "weight": torch.zeros(64, 64).to(torch.float8_e5m2)},
            "q_proj.weight has dtype F8_E5M2, which is not supported",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    kind: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    quantization, matrix, _ = KINDS[kind]
    assert message in failure(tmp_path, folder(quantization, matrix).changed(**changes))


def test_what_is_missing_costs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that promises much is refused by the headers: nothing is allocated, no matrix made."""

    def never(*_: object, **__: object) -> Tensor:
        raise AssertionError("memory was taken")

    made = folder(GPTQ | {"desc_act": True}, gptq(32, order="shared"))
    made = made.changed(**{"model__layers__1__mlp__up_proj__g_idx": grouped_index(9).repeat(1)})
    monkeypatch.setattr("agentserve.models.assemble.torch.empty", never)
    monkeypatch.setattr("agentserve.models.quantized_tensors.gptq_matrix", never)
    assert "up_proj.g_idx names group 9 of 2" in failure(tmp_path, made)


def test_widths_that_words_do_not_fill(tmp_path: Path) -> None:
    made = folder(AWQ, awq(32))
    narrow = Folder(made.config | {"intermediate_size": 80}, made.tensors, made.numbers)
    text = failure(tmp_path, narrow)
    assert "matrix model.layers.0.mlp.down_proj is [64, 80]: 4 bits need multiples of 8 and 32" in text


def test_quantised_tensors_need_a_config(tmp_path: Path) -> None:
    made = folder(FP8, fp8("tensor", "weight_scale"))
    del made.config["quantization_config"]
    bare = made.changed(**{name: None for name in made.tensors if name.endswith("_scale")})
    assert "_proj.weight has dtype F8_E4M3, which is not supported" in failure(tmp_path / "fp8", bare)
    made = folder(AWQ, awq(32))
    del made.config["quantization_config"]
    assert "is not part of a qwen2 model" in failure(tmp_path / "awq", made)


def test_other_names_and_dtypes_of_the_same(tmp_path: Path) -> None:
    """As some writers spell settings; scales that are powers of two in 8 bits."""
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    made = folder(old, awq(32))
    check(load(made.write(tmp_path / "old")).weights, made)
    blocks = FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    made = folder(blocks, fp8("32x32", "weight_scale_inv", torch.float8_e8m0fnu))
    check(load(made.write(tmp_path / "powers")).weights, made)


def test_symmetric_zeros_are_8(tmp_path: Path) -> None:
    made = folder(compressed("pack-quantized", symmetric=True, **FOUR), packed(32, symmetric=True))
    down = load(made.write(tmp_path)).weights.layers[0].down
    assert isinstance(down, GroupedMatrix)
    assert set(down.zeros.unique().tolist()) == {8}
