"""A token's logits depend on its prefix alone, bit for bit: chunks, batch mates, pages, cache hits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentserve.core.plan import Chunk, PageCopy
from agentserve.models.config import DecoderConfig
from agentserve.models.hf_config import hf_config
from agentserve.models.load import load_model
from agentserve.models.source import resolve
from agentserve.models.weights import DecoderWeights, random_weights
from kernels import ops_for
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from tests.parity.harness import CPU, VOCAB, Engine, config_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = ("llama", "qwen3", "qwen2-windows")
LENGTH = 330  # several attention tiles


BACKENDS: dict[str, Callable[[], Ops]] = {
    "reference": lambda: ReferenceOps(CPU),
    "served": lambda: ops_for(CPU),  # what a server on this machine would use
}


@lru_cache
def tiny(
    name: str, dtype: torch.dtype, backend: str = "served"
) -> tuple[DecoderConfig, DecoderWeights, list[int], tuple[Tensor, ...]]:
    """A tiny model, a history, and the cold logits at each of its positions."""
    config = hf_config(config_json(name), name)
    weights = random_weights(config, 3, std=0.25, dtype=dtype)
    tokens = random.Random(name).choices(range(VOCAB), k=LENGTH)
    found = Engine(config, weights, pages=64, ops=BACKENDS[backend]()).logits(tokens, [1])
    return config, weights, tokens, tuple(found[at] for at in range(LENGTH))


def company(engine: Engine, order: random.Random, count: int) -> list[Chunk]:
    """Chunks of other sessions to share a step with, some of them already under way."""
    chunks = []
    for number in range(count):
        tokens = order.choices(range(engine.config.vocab_size), k=order.choice((1, 3, 40, 150)))
        tables = engine.tables(len(tokens))
        start = order.randrange(len(tokens))
        if start:
            engine.run(engine.chunk(f"mate{number}", tokens, 0, start, tables))
        chunks.append(engine.chunk(f"mate{number}", tokens, start, len(tokens), tables))
    return chunks


def run_in_company(
    engine: Engine, tokens: Sequence[int], cuts: Sequence[int], order: random.Random, mates: int = 3
) -> dict[int, Tensor]:
    """Logits at each cut of `tokens`, every chunk run among others at a random place in the step."""
    tables = engine.tables(len(tokens))
    found = {}
    start = 0
    for end in cuts:
        others = company(engine, order, order.randint(0, mates))
        place = order.randint(0, len(others))
        own = engine.chunk("own", tokens, start, end, tables)
        engine.run(*others[:place], own, *others[place:])
        found[end - 1] = engine.spy.rows["own"]
        for other in others:
            engine.free(other.tables)
        start = end
    return found


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(
    cuts=st.sets(st.integers(1, LENGTH), min_size=1, max_size=9),
    seed=st.integers(0, 2**16),
    most_rows=st.sampled_from((5, 64, 512)),
)
def test_chunks_mates_and_pages_leave_no_trace(
    name: str, dtype: str, backend: str, cuts: set[int], seed: int, most_rows: int
) -> None:
    config, weights, tokens, cold = tiny(name, DTYPES[dtype], backend)
    engine = Engine(config, weights, pages=96, seed=seed, most_rows=most_rows, ops=BACKENDS[backend]())
    found = run_in_company(engine, tokens, sorted(cuts), random.Random(seed))
    for at, row in found.items():
        assert torch.equal(row, cold[at]), at


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(shared=st.integers(1, LENGTH - 2), seed=st.integers(0, 2**16))
def test_a_fork_with_a_copied_page_leaves_no_trace(
    name: str, dtype: str, backend: str, shared: int, seed: int
) -> None:
    config, weights, tokens, cold = tiny(name, DTYPES[dtype], backend)
    engine = Engine(config, weights, pages=96, seed=seed, ops=BACKENDS[backend]())
    full, slots = divmod(shared, 16)
    donor_tokens = [*tokens[:shared], *reversed(tokens[shared:])]
    donor, fresh = engine.tables(LENGTH), engine.tables(LENGTH)
    engine.logits(donor_tokens, [1 + seed % 70], donor)
    taker = tuple(mine[:full] + other[full:] for mine, other in zip(donor, fresh, strict=True))
    copies = [
        PageCopy(group, mine[full], other[full], slots)
        for group, (mine, other) in enumerate(zip(donor, taker, strict=True))
        if slots
    ]
    engine.run(engine.chunk("own", tokens, shared, shared + 1, taker), copies=copies)
    assert torch.equal(engine.spy.rows["own"], cold[shared])
    for at, row in engine.logits(tokens, [37], taker, start=shared + 1).items():
        assert torch.equal(row, cold[at]), at


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("threads", [2, 3], indirect=True)
def test_with_threads_too(threads: int, dtype: str) -> None:
    """More threads may round otherwise, but again alike in all company. Wide enough to be shared out."""
    wide = config_json("llama") | {"hidden_size": 512, "intermediate_size": 1000, "num_hidden_layers": 2}
    config = hf_config(wide, "wide")
    weights = random_weights(config, 3, std=0.06, dtype=DTYPES[dtype])
    tokens = random.Random(threads).choices(range(VOCAB), k=200)
    cold = Engine(config, weights, pages=64).logits(tokens, [200])[199]
    for seed, cuts in enumerate(([100, 200], [1, 17, 130, 199, 200], [67, 131, 195, 198, 200])):
        engine = Engine(config, weights, pages=96, seed=seed)
        assert torch.equal(run_in_company(engine, tokens, cuts, random.Random(seed))[199], cold), cuts


@pytest.mark.parametrize("page_size", [1, 4, 32, 128])
def test_the_page_size_leaves_no_trace(page_size: int) -> None:
    config, weights, tokens, cold = tiny("llama", torch.float32)
    engine = Engine(config, weights, pages=1 + LENGTH // page_size, page_size=page_size)
    for at, row in engine.logits(tokens, [50], engine.tables(LENGTH)).items():
        assert torch.equal(row, cold[at]), at


def test_another_history_has_other_bits() -> None:
    """The comparison above can fail: one early token changes every later row."""
    config, weights, tokens, cold = tiny("llama", torch.bfloat16)
    other = [(tokens[0] + 1) % VOCAB, *tokens[1:]]
    found = Engine(config, weights, pages=64).logits(other, [64])
    assert not any(torch.equal(row, cold[at]) for at, row in found.items())


@pytest.mark.model
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_smollm2_histories(threads: int, dtype: str) -> None:
    """The real model: a long history cut in several ways, alone and in company, from several hits."""
    loaded = load_model(resolve("smollm2-135m"), DTYPES[dtype], CPU)
    engine = Engine(loaded.config, loaded.weights, pages=160)
    tokens = random.Random(5).choices(range(1000, 40_000), k=270)
    ends = [129, 130, 257, 270]
    cold: dict[int, Tensor] = {}
    for end in ends:
        fresh = engine.tables(end)
        engine.run(engine.chunk("s", tokens, 0, end, fresh))
        cold[end - 1] = engine.spy.rows["s"]
        engine.free(fresh)
    order = random.Random(9)
    for cuts in (ends, [1, 17, *ends], [64, 128, *ends, 258, 269]):
        found = run_in_company(engine, tokens, sorted(cuts), order, mates=1)
        for at in cold.keys() & found.keys():
            assert torch.equal(found[at], cold[at]), (cuts, at)
    cold_tables = engine.tables(len(tokens))
    engine.logits(tokens, [77], cold_tables)
    for hit in (96, 128, 250, 269):
        found = engine.logits(tokens, [270], cold_tables, start=hit)
        assert torch.equal(found[269], cold[269]), hit
