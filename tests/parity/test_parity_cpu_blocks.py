"""The whole forward pass in C++ over block weights, against the same weights expanded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from agentserve.models.load import LoadedModel, load_model
from agentserve.models.source import ModelSource, resolve
from kernels.blocks import FORMATS
from kernels.cpu import cpu_ops
from kernels.cpu.ops import CpuOps
from kernels.ops import Activations
from kernels.reference import ReferenceOps
from tests.cpu_builds import CHECKED, builds
from tests.parity.harness import CPU, Engine
from tests.unit.test_models_gguf import model
from tests.unit.test_models_gguf_blocks import Kind, KindOf, uniform, write

LOST: dict[tuple[str, Activations, torch.dtype], float] = {
    ("Q4_1", "float", torch.float32): 1e-5,
    ("Q4_1", "float", torch.bfloat16): 1e-2,
    ("Q4_1", "int8", torch.float32): 1e-2,
    ("Q4_1", "int8", torch.bfloat16): 1.2e-2,
    ("Q4_K", "float", torch.float32): 1e-5,
    ("Q4_K", "float", torch.bfloat16): 5e-2,
    ("Q4_K", "int8", torch.float32): 7e-2,
    ("Q4_K", "int8", torch.bfloat16): 8e-2,
}
"""What rounding may take of the logits: about twice what it does (in float32 four to twenty times)."""
TOKENS = random.Random(4).choices(range(40), k=37)

ops = builds(CHECKED)


@pytest.fixture
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mixed(name: str) -> KindOf:
    """As "Q4_K_M" files are: V and some other matrices in other formats, some plain."""

    def kind_of(tensor: str) -> Kind:
        if "attn_v" in tensor:
            return Kind.Q6_K
        if "blk.1.ffn_up" in tensor:
            return Kind.Q5_0
        if "blk.1.attn_output" in tensor:
            return Kind.F32
        return Kind[name]

    return kind_of


def saved(path: Path, kind_of: KindOf, tied: bool = False) -> ModelSource:
    _, _, stored = model(tied)
    write(path, stored, kind_of)
    return ModelSource("gguf", path, "m")


def logits(
    loaded: LoadedModel, ops: CpuOps | ReferenceOps, sizes: list[int], activations: Activations = "float"
) -> Tensor:
    """Logits after the last of some chunks."""
    engine = Engine(loaded.config, loaded.weights, ops=ops, activations=activations)
    found = engine.logits(TOKENS, sizes)
    return found[len(TOKENS) - 1]


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    assert bool(expected.isfinite().all())
    return float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_give_what_expanded_weights_give(ops: CpuOps, name: str, tied: bool, tmp_path: Path) -> None:
    source = saved(tmp_path / "m.gguf", uniform(gguf.GGMLQuantizationType[name]), tied)
    expected = logits(load_model(source, torch.float32, CPU), ReferenceOps(CPU), [37])
    loaded = load_model(source, torch.float32, CPU, "stored")
    found = logits(loaded, ops, [20, 1])
    assert close(found, expected, 1e-5)
    assert torch.equal(logits(loaded, ops, [37]), found), "chunks leave no trace"
    assert not close(found, expected.roll(1), 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("name", ["Q4_K", "Q4_1"])
def test_mixtures_of_formats_and_plain_matrices(
    ops: CpuOps, name: str, activations: Activations, dtype: torch.dtype, tmp_path: Path
) -> None:
    """V in another format than Q and K, gates in another than ups, a plain matrix among blocks."""
    source = saved(tmp_path / "m.gguf", mixed(name))
    loaded = load_model(source, dtype, CPU, "stored")
    expected = logits(load_model(source, torch.float32, CPU), ReferenceOps(CPU), [37])
    found = logits(loaded, ops, [20, 1], activations)
    assert close(found, expected, LOST[name, activations, dtype])
    assert not close(found, expected.roll(1), 0.5)
    assert torch.equal(logits(loaded, ops, [5, 32], activations), found), "chunks leave no trace"
    if activations == "int8":
        exact = logits(loaded, ops, [37])
        assert not close(found, exact, 1e-4), "8 bits show"


@pytest.mark.model
@pytest.mark.usefixtures("single_thread")
def test_smollm2_from_its_blocks() -> None:
    """Float32 from the file's own blocks: logits and greedy tokens of the expanded model."""
    source, ops = resolve("smollm2-135m"), cpu_ops()
    history = random.Random(5).choices(range(1000, 40_000), k=60)
    answers = []
    for kept in ("stored", "expanded"):
        loaded = load_model(source, torch.float32, CPU, kept)
        engine = Engine(loaded.config, loaded.weights, ops=ops)
        tables, tokens, rows = engine.tables(80), list(history), []
        for _ in range(12):
            start = 0 if not rows else len(tokens) - 1
            rows.append(engine.logits(tokens, [len(tokens)], tables, start)[len(tokens) - 1])
            tokens.append(int(rows[-1].argmax()))
        answers.append((tokens, torch.stack(rows)))
    (stored, found), (expanded, expected) = answers
    assert stored == expanded
    assert float((found - expected).abs().max()) < 1e-3
