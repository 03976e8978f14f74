"""GGUF files written here with the `gguf` package, read back by the loader, whole and damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from agentserve.models.config import DecoderConfig, RopeKind
from agentserve.models.errors import ModelError
from agentserve.models.gguf_config import gguf_config
from agentserve.models.gguf_file import GgufFile
from agentserve.models.load import load_model, open_model
from agentserve.models.source import ModelSource
from agentserve.models.weights import named_parts, random_weights

Kind = gguf.GGMLQuantizationType
CPU = torch.device("cpu")
ARCH = {
    "architecture": "llama",
    "embedding_length": 256,
    "feed_forward_length": 256,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Values = npt.NDArray[np.float32]


def gguf_name(name: str) -> str:
    stem, ending = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{ending}"
    return f"{_NAMES[stem]}.{ending}"


def interleave(values: Values, heads: int) -> Values:
    """What the writers of the Llama family do to Q and K: row i + head_dim/2 goes next to row i."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def write(
    path: Path,
    tensors: Mapping[str, Values],
    kind: Kind = Kind.F32,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """A GGUF file: matrices as `kind`, vectors as float32; metadata goes under the architecture."""
    values = ARCH | dict(metadata or {})
    arch = str(values.pop("architecture"))
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        full = key if key.startswith(("tokenizer.", "split.")) else f"{arch}.{key}"
        add: dict[type, Callable[[str, Any], None]] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](full, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and kind is not Kind.F32:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model(
    tied: bool = False, interleaved: bool = True
) -> tuple[DecoderConfig, dict[str, Values], dict[str, Values]]:
    """A config, its tensors by Hugging Face name, and the same as a GGUF writer would store them."""
    from agentserve.models.config import RopeConfig

    config = DecoderConfig(
        "llama", 256, 256, 2, 4, 2, 64, 40, 1e-5, RopeConfig(5000.0), 128, tied, (None, None), (True, True)
    )
    plain = {name: part.numpy().copy() for name, part in named_parts(config, random_weights(config, 1))}
    stored = {}
    for name, values in plain.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        stored[gguf_name(name)] = interleave(values, heads) if heads and interleaved else values
    return config, plain, stored


def loaded_parts(path: Path) -> dict[str, torch.Tensor]:
    loaded = load_model(ModelSource("gguf", path, "m"), torch.float32, CPU)
    return dict(named_parts(loaded.config, loaded.weights))


def test_a_whole_model_comes_back(tmp_path: Path) -> None:
    config, plain, stored = model()
    path = tmp_path / "m.gguf"
    write(path, stored)
    parts = loaded_parts(path)
    assert open_model(ModelSource("gguf", path, "m")).config.rms_eps == pytest.approx(config.rms_eps)
    assert parts.keys() == plain.keys()
    for name, values in plain.items():
        assert np.array_equal(parts[name].numpy(), values), name


def test_no_output_matrix_means_tied(tmp_path: Path) -> None:
    _, _, stored = model(tied=True)
    write(tmp_path / "m.gguf", stored)
    loaded = load_model(ModelSource("gguf", tmp_path / "m.gguf", "m"), torch.bfloat16, CPU)
    assert loaded.config.tie_embeddings
    assert loaded.weights.lm_head is loaded.weights.embedding
    assert loaded.weights.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "kind",
    [Kind.BF16, Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.TQ1_0, Kind.TQ2_0],
)
def test_types_that_the_package_can_write(kind: Kind, tmp_path: Path) -> None:
    _, plain, stored = model()
    write(tmp_path / "m.gguf", stored, kind)
    parts = loaded_parts(tmp_path / "m.gguf")
    for name, values in plain.items():
        # Blocks run along rows, so quantising commutes with the order of rows.
        expected = values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)
        assert np.array_equal(parts[name].numpy(), expected.reshape(values.shape)), name


@pytest.mark.parametrize("kind", list(gguf.quants._type_traits), ids=lambda kind: kind.name)
def test_every_type_the_package_can_read(kind: Kind, tmp_path: Path) -> None:
    """Raw blocks of bytes, among them those of the types that only other tools write."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(int(kind)).integers(0, 100, (6, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(tmp_path / "m.gguf").tensors()["x.weight"]
    assert tensor.shape == (6, 512)
    assert np.array_equal(tensor.values(), gguf.dequantize(raw, kind).reshape(6, 512), equal_nan=True)


def test_qwen_keeps_the_order_of_rows(tmp_path: Path) -> None:
    _, plain, stored = model(interleaved=False)
    write(tmp_path / "m.gguf", stored, metadata={"architecture": "qwen2"})
    parts = loaded_parts(tmp_path / "m.gguf")
    assert np.array_equal(
        parts["model.layers.0.self_attn.q_proj.weight"], plain["model.layers.0.self_attn.q_proj.weight"]
    )


def test_rope_of_gguf(tmp_path: Path) -> None:
    _, _, stored = model()
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    write(tmp_path / "m.gguf", stored | {"rope_freqs.weight": factors}, metadata=yarn)
    loaded = load_model(ModelSource("gguf", tmp_path / "m.gguf", "m"), torch.float32, CPU)
    rope = loaded.config.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == (
        RopeKind.YARN,
        5000.0,
        4.0,
        32,
    )
    assert rope.attention_factor == pytest.approx(1.13862944)
    assert loaded.weights.rope_factors is not None
    assert np.array_equal(loaded.weights.rope_factors, factors)


def test_smollm3_leaves_every_fourth_layer_unrotated(tmp_path: Path) -> None:
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, metadata={"architecture": "smollm3", "block_count": 8})
    assert gguf_config(GgufFile(tmp_path / "m.gguf")).rotary == (True, True, True, False) * 2


def test_end_tokens(tmp_path: Path) -> None:
    ids = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
    }
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, metadata=ids)
    config = gguf_config(GgufFile(tmp_path / "m.gguf"))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "gemma3"}, "architecture gemma3 is not supported in GGUF"),
        ({"attention.head_count": 3}, "3 heads are no multiple of 2 KV heads"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope.dimension_count": 32}, "rope.dimension_count other than the head dimension"),
        ({"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"context_length": 0}, "context_length must be a whole number of at least 1"),
        ({"context_length": 20_000_000}, "context_length must be at most 16777216"),
        ({"block_count": 2**31}, "block_count must be at most 1024"),
        ({"feed_forward_length": 2**30}, "feed_forward_length must be at most 1048576"),
        ({"block_count": 3}, "tensor blk.2.attn_norm.weight is missing (and 8 more)"),
        ({"block_count": 1}, "tensor blk.1.attn_norm.weight is not part of a llama model"),
        ({"feed_forward_length": 512}, "has shape [256, 256], the config asks for [512, 256]"),
        ({"split.count": 2}, "several parts"),
    ],
)
def test_metadata_that_does_not_fit(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, metadata=metadata)
    assert message in failure(tmp_path / "m.gguf")


def failure(path: Path) -> str:
    """The one line with which loading `path` fails; it must name the file."""
    with pytest.raises(ModelError) as raised:
        load_model(ModelSource("gguf", path, "m"), torch.float32, CPU)
    text = str(raised.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text


def test_missing_and_foreign_tensors(tmp_path: Path) -> None:
    _, _, stored = model()
    path = tmp_path / "m.gguf"
    write(path, {name: values for name, values in stored.items() if name != "blk.1.ffn_up.weight"})
    assert failure(path).endswith("tensor blk.1.ffn_up.weight is missing")
    write(path, stored | {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)})
    assert failure(path).endswith("tensor blk.0.ffn_gate_exps.weight is not part of a llama model")
    write(path, stored | {"rope_freqs.weight": np.ones(5, np.float32)})
    assert failure(path).endswith("tensor rope_freqs.weight has shape [5], expected [32]")


def test_a_file_cut_short_names_the_tensor(tmp_path: Path) -> None:
    _, _, stored = model()
    path = tmp_path / "m.gguf"
    write(path, stored, Kind.Q8_0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    last = list(stored)[-1]
    assert f"tensor {last} ends at byte" in failure(path)
    for length in (0, 3, 4, 11, 24, 60, 200, 700, 1500):
        path.write_bytes(whole[:length])
        failure(path)


def test_damaged_headers(tmp_path: Path) -> None:
    """A flipped byte in the header never gives more than one clear line."""
    _, _, stored = model()
    path = tmp_path / "m.gguf"
    write(path, {name: values for name, values in stored.items() if name.startswith("blk.0")})
    whole = bytearray(path.read_bytes())
    for place in range(0, 900, 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        failure(path)  # layer 1 is not in the file, so that it fails in any case


def test_no_such_file(tmp_path: Path) -> None:
    assert failure(tmp_path / "absent.gguf").endswith("no such file")


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    _, _, stored = model()
    sources = [ModelSource("gguf", tmp_path / f"{name}.gguf", name) for name in "abc"]
    for source in sources:
        write(source.path, stored)
    changed = bytearray(sources[2].path.read_bytes())
    changed[-200] ^= 1
    sources[2].path.write_bytes(changed)
    first, second, third = (load_model(source, torch.float32, CPU).digest for source in sources)
    assert first == second != third
