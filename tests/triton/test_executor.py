"""The whole engine on the Triton backend: it says what the reference says, and no path shows in its bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentserve.executor.sampler import Sampler
from agentserve.messages import Fork
from agentserve.models.config import DecoderConfig
from agentserve.models.decoder import Decoder
from agentserve.models.hf_config import hf_config
from agentserve.models.weights import DecoderWeights, random_weights
from agentserve.types import SessionId
from kernels.blocks import FORMATS, BlockMatrix, BlockRows, expand
from kernels.ops import AttentionShape, GroupPages, Ops, StepRuns
from kernels.reference import ReferenceOps
from kernels.triton.ops import TritonOps
from kernels.triton.recorder import EagerRecorder
from tests.abort_rig import RealRig
from tests.parity.harness import CPU, VOCAB, Engine, config_json
from tests.parity.ledger import Ledger

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CLOSE = 1e-3  # of logits whose spread is about 10, in float32


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> tuple[DecoderConfig, DecoderWeights]:
    """The same numbers in every dtype, up to rounding."""
    config = hf_config(config_json(name) | TINY, name)
    return config, random_weights(config, 3, std=0.25, dtype=dtype)


@lru_cache
def triton() -> TritonOps:
    return TritonOps(CPU, EagerRecorder)


def numbers(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


SHARED = numbers(1, 25)
PROMPTS = {
    "a": [*SHARED, *numbers(2, 5)],
    "b": [*SHARED[:21], *numbers(3, 11)],
    "c": numbers(4, 15),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"temperature": 0.9, "seed": 5, "top_p": 0.95},
    "c": {"temperature": 1.2, "seed": 6, "top_k": 20},
}


@dataclass
class Life:
    """What sessions said, and each row of logits that they were sampled from, by its prefix."""

    said: dict[str, list[int]]
    ledger: Ledger
    preemptions: int
    cached: int
    hits: dict[str, int]


def live(ops: Ops, folder: Path) -> tuple[Life, Decoder]:
    """Three sessions in too little room, one of them forked, then parked to the host and gone on with."""
    config, weights = tiny("llama")
    decoder = Decoder(config, weights, ops, positions=128)
    ledger = Ledger(sampler=Sampler(VOCAB, [b""] * VOCAB, [2], drawing=ops.drawing()))
    rig = RealRig(folder, decoder, ledger, pages=6, max_num_seqs=3)
    rig.policy.eager = True  # what rests is copied to the host
    try:
        rig.executor.prepare(4)  # type: ignore[attr-defined]
        for name, prompt in PROMPTS.items():
            rig.submit(name, prompt, max_tokens=4, **SAMPLING[name])
        rig.drain()
        preemptions = sum(rig.ended(name).usage.preemptions for name in PROMPTS)
        rig.core.handle(Fork(SessionId("a"), SessionId("fork"), 29), rig.now)
        rig.submit("fork", [*PROMPTS["a"][:29], 7], max_tokens=2, temperature=0.7, seed=9)
        rig.drain()
        rig.settle()
        rig.core.kv.evict_all()
        rig.submit("a", [*PROMPTS["a"], *rig.output("a"), 11, 12], max_tokens=2)
        rig.drain()
        said = {name: rig.output(name) for name in (*PROMPTS, "fork")} | {"a2": rig.output("a", 2)}
        hits = dict(rig.tiers.view().hit_tokens)
        return Life(said, ledger, preemptions, rig.ended("fork").usage.cached, hits), decoder
    finally:
        rig.close()


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Life, Life, Decoder]:
    folder = tmp_path_factory.mktemp("lives")
    expected, _ = live(ReferenceOps(CPU), folder / "reference")
    found, decoder = live(triton(), folder / "triton")
    return expected, found, decoder


def test_sessions_say_what_they_say_on_the_reference(lives: tuple[Life, Life, Decoder]) -> None:
    expected, found, _ = lives
    assert found.said == expected.said
    assert found.ledger.rows.keys() == expected.ledger.rows.keys()
    for prefix, row in found.ledger.rows.items():
        assert torch.allclose(row, expected.ledger.rows[prefix], atol=CLOSE), len(prefix)


def test_the_life_had_all_that_it_should(lives: tuple[Life, Life, Decoder]) -> None:
    """Preempted, cached to the token, restored from the host, out of recordings and without."""
    _, found, decoder = lives
    assert found.preemptions > 0
    assert found.cached == 29
    assert found.hits["host"] == 32
    assert decoder.runs.replayed > 4
    assert decoder.runs.launched > 2
    assert decoder.runs.missed == 0


def test_computed_at_once_and_alone_every_row_has_the_same_bits(lives: tuple[Life, Life, Decoder]) -> None:
    _, found, _ = lives
    engine = Engine(*tiny("llama"), pages=12, ops=triton())
    whole = [*PROMPTS["a"], *found.said["a"], 11, 12, *found.said["a2"]]
    prefix = tuple(whole[:-1])
    row = engine.logits(prefix, [len(prefix)])[len(prefix) - 1]
    assert torch.equal(row, found.ledger.rows[prefix])


def test_kv_has_the_same_bits_in_whatever_chunks_it_was_written() -> None:
    engine = Engine(*tiny("llama"), pages=12, ops=triton())
    tokens = numbers(8, 10)
    first, second = engine.tables(len(tokens)), engine.tables(len(tokens))
    engine.logits(tokens, [len(tokens)], first)
    engine.logits(tokens, [6, 1, 3], second)
    storage = engine.pool.storages[0]
    one, other = (storage[list(tables[0])] for tables in (first, second))
    assert torch.equal(kept(one, len(tokens)), kept(other, len(tokens)))
    assert kept(one, len(tokens)).isfinite().all()


def kept(pages: Tensor, tokens: int) -> Tensor:
    """`[tokens, layers, 2, kv_heads, dim]` of pages `[pages, layers, 2, slots, kv_heads, dim]`."""
    return pages.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:tokens]


@pytest.mark.parametrize(
    ("name", "length"), [("qwen3", 6), ("qwen2-windows", 22), ("smollm3", 6), ("llama-biased", 6)]
)
def test_other_architectures_agree_with_the_reference(name: str, length: int) -> None:
    """Norms of heads, windows in two groups, layers without rotation, biases, tied embeddings."""
    tokens = numbers(9, length)
    found = Engine(*tiny(name), pages=4, ops=triton()).logits(tokens, [length - 1, 1])
    expected = Engine(*tiny(name), pages=4, ops=ReferenceOps(CPU)).logits(tokens, [length - 1, 1])
    assert found.keys() == expected.keys() == {length - 2, length - 1}
    for at, row in found.items():
        assert torch.allclose(row, expected[at], atol=CLOSE), at


def test_fp16_steps_are_those_of_fp32_but_for_rounding() -> None:
    tokens = numbers(10, 7)
    config, wide = tiny("llama")
    narrow = tiny("llama", torch.float16)[1]
    found = Engine(config, narrow, pages=4, ops=triton()).logits(tokens, [6, 1])
    expected = Engine(config, wide, pages=4, ops=ReferenceOps(CPU)).logits(tokens, [6, 1])
    for at, row in found.items():
        assert row.dtype == torch.float32
        assert float((row - expected[at]).abs().mean()) < 0.05
        assert not torch.equal(row, expected[at])


def test_the_backend_names_everything_that_decides_rounding() -> None:
    ops = triton()
    assert ops.name == "triton"
    for part in (torch.__version__, "triton-", "interpreter", "products-", "sources-"):
        assert part in ops.numerics
    assert ops.numerics == TritonOps(CPU).numerics


def in_blocks(rows: int, width: int) -> BlockMatrix:
    """A random matrix in blocks of Q8_0: a float16 and 32 codes each."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, width // 32, 32), generator=generator, dtype=torch.int8)
    scales = torch.full((rows, width // 32, 1), 0.004, dtype=torch.float16)
    data = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=-1).flatten(1)
    return BlockMatrix((BlockRows(FORMATS["Q8_0"], data),), width)


def test_an_embedding_and_a_head_in_blocks_are_read_in_recordings_too() -> None:
    config, weights = tiny("llama")
    blocks = in_blocks(VOCAB, config.hidden_size)
    stored = replace(weights, embedding=blocks, lm_head=blocks)
    numbers_of = expand(blocks, torch.float32)
    plain = replace(weights, embedding=numbers_of, lm_head=numbers_of)
    tokens = numbers(11, 4)
    engine = Engine(config, stored, pages=4, ops=triton())
    engine.executor.prepare(1)
    found = engine.logits(tokens, [3, 1])
    assert engine.decoder.runs == StepRuns(replayed=1, missed=0, launched=1)
    expected = Engine(config, plain, pages=4, ops=ReferenceOps(CPU)).logits(tokens, [3, 1])
    for at, row in found.items():
        assert torch.allclose(row, expected[at], atol=CLOSE), at


def test_pages_that_kernels_cannot_address_are_refused_at_the_start() -> None:
    config, weights = tiny("llama")
    decoder = Decoder(config, weights, triton(), positions=64)
    shape = AttentionShape(heads=4, kv_heads=1, dim=16, slots=1)
    pages = torch.zeros((4, 2, 2, 1, 1, 20), dtype=torch.int8)
    with pytest.raises(
        ValueError, match="pages of 1 tokens: a layer's part of 40 bytes is no multiple of 16"
    ):
        decoder.prepare([GroupPages(pages, shape)], 1)
