"""Weights that stay in a GGUF file's blocks: each format, mixtures, rows in order, and whose memory it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from agentserve.models.errors import ModelError
from agentserve.models.load import LoadedModel, WeightStorage, load_model
from agentserve.models.source import ModelSource
from agentserve.models.weights import DecoderWeights, layout, named_parts
from kernels.blocks import FORMATS, BlockMatrix, expand
from tests.unit.test_kernels_blocks import random_bytes
from tests.unit.test_models_gguf import ARCH, Values, model

CPU = torch.device("cpu")
Kind = gguf.GGMLQuantizationType
KindOf = Callable[[str], Kind]


def uniform(kind: Kind) -> KindOf:
    return lambda name: kind


def write(
    path: Path,
    stored: Mapping[str, Values],
    kind_of: KindOf,
    arch: str = "llama",
    order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> None:
    """A GGUF file with each matrix as `kind_of` names it: quantised where the package can, random
    valid blocks where only other tools can."""
    writer = gguf.GGUFWriter(path, arch, endianess=order)
    for key, value in ARCH.items():
        if isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
    for number, (name, tensor) in enumerate(stored.items()):
        kind = kind_of(name) if tensor.ndim == 2 else Kind.F32
        if kind is Kind.F32:
            writer.add_tensor(name, tensor)
        elif kind.name.endswith("_K"):
            writer.add_tensor(name, raw_blocks(kind, *tensor.shape, seed=number), raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw_blocks(kind: Kind, rows: int, width: int, seed: int) -> npt.NDArray[np.uint8]:
    if kind.name in FORMATS:
        return random_bytes(kind.name, rows, width, seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(seed).integers(0, 60, (rows, width // block * size), dtype=np.uint8)


def load(path: Path, kept: WeightStorage = "stored", dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(ModelSource("gguf", path, "m"), dtype, CPU, kept)


def fields(weights: DecoderWeights) -> dict[str, torch.Tensor | BlockMatrix]:
    """Every matrix of the weights by place."""
    found = {"embedding": weights.embedding, "lm_head": weights.lm_head}
    for number, layer in enumerate(weights.layers):
        found |= {f"{number}.{name}": getattr(layer, name) for name in ("qkv", "o", "gate_up", "down")}
    return found


def assert_same_numbers(path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Stored blocks, expanded, are what the loader gives that expands them itself."""
    stored, expanded = fields(load(path, dtype=dtype).weights), fields(load(path, "expanded", dtype).weights)
    for name, matrix in expanded.items():
        assert isinstance(matrix, torch.Tensor)
        assert stored[name].shape == tuple(matrix.shape), name
        assert torch.equal(expand(stored[name], dtype), matrix), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_stays_as_it_is(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(Kind[name]))
    weights = load(tmp_path / "m.gguf", dtype=dtype).weights
    assert weights.formats == (name,)
    assert weights.dtype == weights.norm.dtype == dtype
    for matrix in fields(weights).values():
        assert isinstance(matrix, BlockMatrix)
        assert {run.format.name for run in matrix.runs} == {name}
    assert [len(getattr(weights.layers[1], field).runs) for field in ("qkv", "o", "gate_up")] == [3, 1, 2]
    assert_same_numbers(tmp_path / "m.gguf", dtype)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_rows_of_q_and_k_come_in_the_decoders_order(name: str, arch: str, tmp_path: Path) -> None:
    """Whole rows of bytes are moved: the same as expanding and then permuting, and nothing where a
    file's rows are in order already."""
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(Kind[name]), arch)
    qkv = load(tmp_path / "m.gguf").weights.layers[0].qkv
    assert isinstance(qkv, BlockMatrix)
    raws = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for run, part, heads in zip(qkv.runs, "qkv", (4, 2, None), strict=True):
        values = gguf.dequantize(raws[f"blk.0.attn_{part}.weight"], Kind[name])
        if heads and arch == "llama":
            values = values.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(values.shape)
        assert np.array_equal(expand(BlockMatrix((run,), 256), torch.float32).numpy(), values), part


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    config, _, stored = model(tied=True)
    write(tmp_path / "m.gguf", stored, lambda name: Kind.Q8_0 if "token_embd" in name else Kind.Q4_0)
    weights = load(tmp_path / "m.gguf").weights
    assert weights.lm_head is weights.embedding
    assert weights.formats == ("Q4_0", "Q8_0")
    assert weights.parameters == load(tmp_path / "m.gguf", "expanded").weights.parameters
    assert weights.parameters == sum(int(np.prod(part.shape)) for part in layout(config))


def test_runs_of_one_matrix_may_differ(tmp_path: Path) -> None:
    """As in Q4_K_M files, whose V is finer than Q and K."""
    _, _, stored = model()
    kinds = {"attn_v": Kind.Q6_K, "attn_k": Kind.Q5_K}
    write(tmp_path / "m.gguf", stored, lambda name: kinds.get(name.split(".")[-2], Kind.Q4_K))
    layer = load(tmp_path / "m.gguf").weights.layers[1]
    formats = {}
    for field in ("qkv", "gate_up", "o"):
        matrix = getattr(layer, field)
        assert isinstance(matrix, BlockMatrix)
        formats[field] = [run.format.name for run in matrix.runs]
    assert formats == {"qkv": ["Q4_K", "Q5_K", "Q6_K"], "gate_up": ["Q4_K", "Q4_K"], "o": ["Q4_K"]}
    assert_same_numbers(tmp_path / "m.gguf")


def test_gates_and_ups_in_different_formats_are_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole, in the layers that have them; what the weights say of themselves is true; one line says so."""
    _, _, stored = model()
    odd = ("blk.0.ffn_up.weight", "blk.1.ffn_gate.weight")
    write(tmp_path / "m.gguf", stored, lambda name: Kind.Q5_K if name in odd[:1] else Kind.Q4_K)
    with caplog.at_level(logging.INFO, "agentserve.models.assemble"):
        weights = load(tmp_path / "m.gguf", dtype=torch.bfloat16).weights
    assert isinstance(weights.layers[0].gate_up, torch.Tensor)
    assert weights.layers[0].gate_up.dtype == torch.bfloat16
    assert isinstance(weights.layers[1].gate_up, BlockMatrix)
    assert weights.formats == ("Q4_K",)
    (line,) = caplog.messages
    assert line.endswith("in 1 of its layers gates and ups are in different formats and are expanded")
    write(tmp_path / "n.gguf", stored, lambda name: Kind.Q5_K if name in odd else Kind.Q4_K)
    weights = load(tmp_path / "n.gguf").weights
    assert not any(isinstance(layer.gate_up, BlockMatrix) for layer in weights.layers)
    assert_same_numbers(tmp_path / "n.gguf")


@pytest.mark.parametrize("odd", [Kind.F16, Kind.F32, Kind.BF16, Kind.TQ1_0, Kind.Q3_K])
def test_one_part_out_of_blocks_expands_its_matrix(odd: Kind, tmp_path: Path) -> None:
    """Numbers, and formats that the kernels do not know."""
    _, _, stored = model()

    def kind_of(name: str) -> Kind:
        return odd if name in ("blk.0.attn_v.weight", "blk.1.ffn_gate.weight", "output.weight") else Kind.Q5_1

    write(tmp_path / "m.gguf", stored, kind_of)
    weights = load(tmp_path / "m.gguf").weights
    plain = {name for name, matrix in fields(weights).items() if isinstance(matrix, torch.Tensor)}
    assert plain == {"0.qkv", "1.gate_up", "lm_head"}
    assert_same_numbers(tmp_path / "m.gguf")


def mapped(path: Path) -> list[range]:
    """Where this process has `path` in its memory."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            start, end = line.split(maxsplit=1)[0].split("-")
            found.append(range(int(start, 16), int(end, 16)))
    return found


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux where memory comes from")
def test_blocks_lie_in_the_file_and_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    _, _, stored = model()
    write(path, stored, uniform(Kind.Q4_1))
    weights = load(path).weights
    places = mapped(path)
    for name, matrix in fields(weights).items():
        assert isinstance(matrix, BlockMatrix)
        for number, run in enumerate(matrix.runs):
            moved = name.endswith("qkv") and number < 2
            inside = any(run.data.data_ptr() in place for place in places)
            assert inside is not moved, (name, number)
            assert run.data.is_contiguous()
    head = weights.lm_head
    assert isinstance(head, BlockMatrix)
    expected = expand(head, torch.float32)
    path.unlink()
    del weights, matrix, run
    assert mapped(Path(f"{path} (deleted)"))
    assert torch.equal(expand(head, torch.float32), expected)
    del head
    assert not mapped(Path(f"{path} (deleted)"))


def test_loading_blocks_allocates_what_is_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in bytes of tensors: norms and biases, and Q and K in their new order."""
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(Kind.Q8_0))
    made: list[int] = []
    empty, wrapped = torch.empty, torch.from_numpy

    def count_empty(*args: object, **options: object) -> torch.Tensor:
        made.append(empty(*args, **options).nbytes)  # type: ignore[call-overload]
        return empty(*args, **options)  # type: ignore[call-overload, no-any-return]

    def count_wrapped(values: npt.NDArray[np.generic]) -> torch.Tensor:
        made.append(values.nbytes if values.base is None else 0)
        return wrapped(values)

    monkeypatch.setattr(torch, "empty", count_empty)
    monkeypatch.setattr(torch, "from_numpy", count_wrapped)
    bytes_of: dict[WeightStorage, int] = {}
    for kept in ("stored", "expanded"):
        made.clear()
        load(tmp_path / "m.gguf", kept)
        bytes_of[kept] = sum(made)
    norms = 5 * 256 * 4
    moved = 2 * (256 + 128) * FORMATS["Q8_0"].row_bytes(256)
    assert norms <= bytes_of["stored"] <= norms + moved + 1024
    assert bytes_of["expanded"] > 4 * 256 * 256 * 4


def test_a_row_of_no_whole_blocks_is_named(tmp_path: Path) -> None:
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(Kind.Q4_0))
    whole = (tmp_path / "m.gguf").read_bytes()
    name = b"blk.0.ffn_up.weight"
    width_at = whole.index(name) + len(name) + 4
    damaged = whole[:width_at] + (250).to_bytes(8, "little") + whole[width_at + 8 :]
    (tmp_path / "m.gguf").write_bytes(damaged)
    for kept in ("stored", "expanded"):
        with pytest.raises(ModelError) as raised:
            load(tmp_path / "m.gguf", kept)
        text = str(raised.value)
        assert text.startswith(f"{tmp_path / 'm.gguf'}: tensor {name.decode()} has rows of 250 weights")
        assert "\n" not in text


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.F32])
def test_the_other_byte_order_is_refused(kind: Kind, tmp_path: Path) -> None:
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(kind), order=gguf.GGUFEndian.BIG)
    for kept in ("stored", "expanded"):
        with pytest.raises(ModelError, match="in another byte order than this machine's is not supported"):
            load(tmp_path / "m.gguf", kept)


def test_blocks_go_to_the_device(tmp_path: Path) -> None:
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(Kind.Q4_0))
    meta = torch.device("meta")
    loaded = load_model(ModelSource("gguf", tmp_path / "m.gguf", "m"), torch.bfloat16, meta, "stored")
    for matrix in fields(loaded.weights).values():
        assert isinstance(matrix, BlockMatrix)
        assert {run.data.device for run in matrix.runs} == {meta}
    assert loaded.weights.norm.device == meta


@pytest.mark.parametrize("change", ["missing", "foreign", "misshapen", "cut"])
def test_what_is_wrong_is_said_for_blocks_too(change: str, tmp_path: Path) -> None:
    _, _, stored = model()
    path = tmp_path / "m.gguf"
    if change == "missing":
        del stored["blk.1.attn_k.weight"]
    elif change == "foreign":
        stored["blk.0.ffn_gate_exps.weight"] = np.zeros((32, 32), np.float32)
    elif change == "misshapen":
        stored["blk.0.attn_v.weight"] = np.zeros((64, 256), np.float32)
    write(path, stored, uniform(Kind.Q5_0))
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelError) as raised:
        load(path)
    expected = {
        "missing": "tensor blk.1.attn_k.weight is missing",
        "foreign": "tensor blk.0.ffn_gate_exps.weight is not part of a llama model",
        "misshapen": "tensor blk.0.attn_v.weight has shape [64, 256], the config asks for [128, 256]",
        "cut": "truncated?",
    }
    assert expected[change] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_blocks_have_no_view_of_their_numbers(tmp_path: Path) -> None:
    config, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(Kind.Q4_0))
    with pytest.raises(TypeError, match="is in blocks"):
        dict(named_parts(config, load(tmp_path / "m.gguf").weights))
