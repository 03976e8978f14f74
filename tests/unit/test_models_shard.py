"""A model in parts: ranks together say what the whole model says, and what cannot be shared is told."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from agentserve.models.decoder import Decoder
from agentserve.models.errors import ModelError
from agentserve.models.hf_config import hf_config
from agentserve.models.load import LoadedModel, load_model, open_model
from agentserve.models.shard import Shard
from agentserve.models.source import ModelSource
from agentserve.models.weights import named_parts, parameter_count, random_weights
from kernels.blocks import BlockMatrix, expand
from kernels.narrow import GroupedMatrix, ScaledMatrix
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from tests.parity.harness import ARCHITECTURES, CPU, VOCAB, Engine, config_json
from tests.quantized_folders import KINDS, folder
from tests.unit.test_kernels_narrow import MATRICES
from tests.unit.test_models_gguf import model
from tests.unit.test_models_gguf_blocks import uniform, write

Kind = gguf.GGMLQuantizationType
TOKENS = [(place * 37 + 11) % VOCAB for place in range(40)]


class Desk:
    """Where the ranks of one process lay down what they have and take what the others have."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._barrier = threading.Barrier(degree, timeout=60)
        self._laid: list[Tensor] = [torch.empty(0)] * degree

    def exchange(self, rank: int, own: Tensor) -> list[Tensor]:
        self._laid[rank] = own
        self._barrier.wait()
        found = list(self._laid)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        self._barrier.abort()


class ThreadRanks:
    """`Ranks` whose ranks are threads of this process."""

    def __init__(self, desk: Desk, rank: int) -> None:
        self._desk, self.rank, self.degree = desk, rank, desk.degree

    def summed(self, summand: Tensor) -> Tensor:
        total = torch.zeros_like(summand, dtype=torch.float32)
        for part in self._desk.exchange(self.rank, summand):
            total += part
        return total.to(summand.dtype)

    def joined(self, columns: Tensor, width: int) -> Tensor:
        parts = self._desk.exchange(self.rank, columns)
        return columns if self.rank else torch.cat(parts, dim=1)


def folder_of(tmp_path: Path, name: str, **changes: object) -> ModelSource:
    """A random model of an architecture, its logits spread out."""
    document = config_json(name) | changes
    config = hf_config(document, name)
    (tmp_path / "config.json").write_text(json.dumps(document))
    parts = {key: part.clone() for key, part in named_parts(config, random_weights(config, 5, std=0.25))}
    save_file(parts, tmp_path / "model.safetensors")
    return ModelSource("folder", tmp_path, name)


def logits(loaded: LoadedModel, ops: Ops, shard: Shard, desk: Desk | None = None) -> Tensor:
    """Of some of `TOKENS`, in chunks: `[ends, vocab]`."""
    config = shard.config(loaded.config)
    engine = Engine(config, loaded.weights, pages=8, ops=ReferenceOps(CPU) if desk is None else ops)
    if desk is not None:
        ranks = ThreadRanks(desk, shard.rank)
        engine.executor._decoder = Decoder(config, loaded.weights, ops, 4096, ranks=ranks)
        if shard.rank:
            engine.spy.sample = lambda logits, specs: [None] * len(specs)  # type: ignore[method-assign, list-item, misc]
            engine.spy.rows["s"] = torch.empty(0)
    return torch.stack(list(engine.logits(TOKENS, [17, 1, 13, 9]).values()))


def together(source: ModelSource, degree: int) -> Tensor:
    """The first rank's logits, the ranks being threads."""
    desk = Desk(degree)

    def rank(number: int) -> Tensor:
        try:
            shard = Shard(number, degree)
            loaded = open_model(source).load(torch.float32, CPU, "stored", shard)
            return logits(loaded, ReferenceOps(CPU), shard, desk)
        except BaseException:
            desk.leave()
            raise

    with ThreadPoolExecutor(degree) as pool:
        found = [future.result() for future in [pool.submit(rank, number) for number in range(degree)]]
    return found[0]


def assert_alike(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 1
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks_say_what_one_says(tmp_path: Path, name: str) -> None:
    source = folder_of(tmp_path, name)
    whole = load_model(source, torch.float32, CPU)
    assert_alike(together(source, 2), logits(whole, ReferenceOps(CPU), Shard()))


@pytest.mark.parametrize(
    ("degree", "changes"),
    [
        (3, {"num_key_value_heads": 3, "intermediate_size": 81}),  # heads shared, 96 tokens by 32
        (2, {"num_key_value_heads": 1}),  # one KV head, repeated
        (4, {"num_attention_heads": 8, "vocab_size": 97}),  # two KV heads, each repeated once; uneven tokens
        (6, {"num_key_value_heads": 3, "intermediate_size": 84}),
    ],
)
def test_heads_are_shared_or_repeated(tmp_path: Path, degree: int, changes: dict[str, object]) -> None:
    source = folder_of(tmp_path, "llama-biased", **changes)
    whole = load_model(source, torch.float32, CPU)
    assert_alike(together(source, degree), logits(whole, ReferenceOps(CPU), Shard()))


def test_a_wrong_share_is_seen(tmp_path: Path) -> None:
    """The comparison can fail: with each rank's tokens those of the other one it does."""
    source = folder_of(tmp_path, "llama", num_key_value_heads=6, intermediate_size=84)
    whole = logits(load_model(source, torch.float32, CPU), ReferenceOps(CPU), Shard())
    right: Callable[[Shard, int], tuple[int, int]] = Shard.tokens
    assert_alike(together(source, 2), whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shard, "tokens", lambda shard, size: right(replace(shard, rank=1 - shard.rank), size))
        with pytest.raises(AssertionError):
            assert_alike(together(source, 2), whole)


@pytest.mark.parametrize(
    ("name", "degree", "changes", "error"),
    [
        ("llama", 4, {}, "6 heads cannot be shared equally by 4 ranks"),
        ("llama", 3, {}, "2 KV heads can neither be shared equally by 3 ranks nor repeated"),
        ("llama", 2, {"intermediate_size": 81}, "an MLP of 81 cannot be shared equally by 2 ranks"),
    ],
)
def test_what_cannot_be_shared_is_told(
    tmp_path: Path, name: str, degree: int, changes: dict[str, object], error: str
) -> None:
    opened = open_model(folder_of(tmp_path, name, **changes))
    with pytest.raises(ModelError) as raised:
        opened.load(torch.float32, CPU, shard=Shard(1, degree))
    assert str(raised.value) == f"{tmp_path}: {error}"


def test_what_is_wrong_with_a_file_every_rank_tells(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "llama-biased")
    config = open_model(source).config
    parts = {key: part.clone() for key, part in named_parts(config, random_weights(config, 5))}
    del parts["model.layers.1.mlp.down_proj.bias"]  # which the second rank does not even keep
    save_file(parts, tmp_path / "model.safetensors")
    for rank in (0, 1):
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.bias is missing"):
            open_model(source).load(torch.float32, CPU, shard=Shard(rank, 2))


def test_a_rank_keeps_its_share_only(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "llama")
    whole = load_model(source, torch.float32, CPU)
    part = open_model(source).load(torch.float32, CPU, shard=Shard(0, 2))
    shared = [layer.qkv.numel() + layer.o.numel() + layer.gate_up.numel() + layer.down.numel()
              for layer in whole.weights.layers]  # fmt: skip
    halved = sum(shared) + whole.weights.lm_head.numel()
    assert part.weights.parameters == whole.weights.parameters - halved // 2
    assert whole.weights.parameters == parameter_count(whole.config) == parameter_count(part.config)
    assert part.weights.step_bytes == part.weights.nbytes - part.weights.embedding.nbytes


def test_a_tied_head_is_a_part_of_the_embedding_in_the_same_memory(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "llama-tied-mha")
    part = open_model(source).load(torch.float32, CPU, shard=Shard(1, 2)).weights
    embedding, head = part.embedding, part.lm_head
    assert isinstance(embedding, Tensor)
    assert isinstance(head, Tensor)
    assert head.data_ptr() == embedding[VOCAB // 2].data_ptr()
    assert part.nbytes == sum(field.nbytes for field in part._all())
    assert part.step_bytes == part.nbytes - embedding.nbytes // 2


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q6_K])
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_shared_as_numbers_are(
    tmp_path: Path, kind: Kind, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut between blocks, or expanded: 256 weights are one block of Q6_K, eight of Q4_1."""
    _, _, stored = model(tied)
    write(tmp_path / "m.gguf", stored, uniform(kind))
    source = ModelSource("gguf", tmp_path / "m.gguf", "m")
    for rank in (0, 1):
        shard = Shard(rank, 2)
        numbers = load_rank(source, "expanded", shard)
        with caplog.at_level(logging.INFO):
            blocks = load_rank(source, "stored", shard)
        torn = kind is Kind.Q6_K
        assert ("in the middle of blocks" in caplog.text) == torn
        for kept, plain in zip(blocks.weights.layers, numbers.weights.layers, strict=True):
            assert isinstance(kept.qkv, BlockMatrix)
            assert isinstance(kept.down, BlockMatrix) != torn
            for name in ("qkv", "o", "gate_up", "down"):
                assert torch.equal(
                    expand(getattr(kept, name), torch.float32), expand(getattr(plain, name), torch.float32)
                )
        head, plain_head = blocks.weights.lm_head, numbers.weights.lm_head
        assert isinstance(head, BlockMatrix)
        assert torch.equal(expand(head, torch.float32), expand(plain_head, torch.float32))
        assert head.shape[0] == 20


def load_rank(source: ModelSource, kept: str, shard: Shard) -> LoadedModel:
    return open_model(source).load(torch.float32, CPU, "stored" if kept == "stored" else "expanded", shard)


@pytest.mark.parametrize("name", KINDS)
def test_quantised_folders_are_shared_as_their_numbers_are(tmp_path: Path, name: str) -> None:
    """The head too; and of a file's tensor, which is read whole, a rank keeps its part alone."""
    quantization, matrix, _ = KINDS[name]
    folder(quantization, matrix, head=True).write(tmp_path)
    source = ModelSource("folder", tmp_path, "m")
    for rank in (0, 1):
        shard = Shard(rank, 2)
        stored = load_rank(source, "stored", shard).weights
        plain = load_rank(source, "expanded", shard).weights
        kept = [stored.lm_head, *(found for layer in stored.layers for found in layer.matrices)]
        numbers = [plain.lm_head, *(found for layer in plain.layers for found in layer.matrices)]
        for found, expected in zip(kept, numbers, strict=True):
            assert torch.equal(expand(found, torch.float32), expand(expected, torch.float32))
            if isinstance(found, ScaledMatrix | GroupedMatrix):
                assert found.codes.untyped_storage().nbytes() == found.codes.nbytes
        assert not isinstance(stored.lm_head, Tensor)


def test_a_tied_head_in_codes_is_a_part_of_the_embedding_in_the_same_memory() -> None:
    for embedding in (MATRICES["fp8-blocks"], MATRICES["int4-order"]):
        whole, first = expand(embedding, torch.float32), embedding.shape[0] // 2
        head = Shard(1, 2).head(embedding)
        assert isinstance(head, ScaledMatrix | GroupedMatrix)
        assert head.codes.data_ptr() == embedding.codes[first].data_ptr()
        assert torch.equal(expand(head, torch.float32), whole[first:])
