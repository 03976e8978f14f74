"""The executor: plans in, results out; what cannot run is reported and touches nobody else."""

from __future__ import annotations

import ctypes
from array import array

import pytest
import torch
from msgspec.structs import replace

from agentserve.core.plan import Chunk, PageCopy, Plan, Sampled
from agentserve.core.ports import Executor
from agentserve.executor.batch import Piece, split_rows
from agentserve.executor.pool import KV_DTYPES, KVPool, kv_groups
from agentserve.executor.runner import TorchExecutor
from agentserve.executor.sampler import NotSampled
from agentserve.models.config import DecoderConfig
from agentserve.models.hf_config import hf_config
from agentserve.models.weights import DecoderWeights, random_weights
from kernels import ops_for
from kernels.cpu.ops import CpuOps
from kernels.ops import Logits
from kernels.reference import ReferenceOps
from tests.parity.harness import CPU, VOCAB, Engine, config_json

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def config_of(name: str = "llama") -> DecoderConfig:
    return hf_config(config_json(name), name)


def weights_of(config: DecoderConfig) -> DecoderWeights:
    return random_weights(config, 2, std=0.25)


@pytest.fixture
def engine() -> Engine:
    config = config_of()
    return Engine(config, weights_of(config), pages=24, ops=ReferenceOps(CPU))


def whole(engine: Engine, session: str = "s") -> Chunk:
    return engine.chunk(session, TOKENS, 0, len(TOKENS), engine.tables(len(TOKENS)))


def plan(*chunks: Chunk, copies: tuple[PageCopy, ...] = ()) -> Plan:
    return Plan(7, copies, chunks, 0.0, ())


def test_results_come_in_order_with_counted_rows(engine: Engine) -> None:
    executor: Executor = engine.executor
    long = replace(whole(engine, "a"), epoch=4)
    silent = replace(whole(engine, "b"), sample=None)
    short_tokens = engine.chunk("c", TOKENS, 0, 5, engine.tables(5))
    result = executor.run(plan(long, silent, short_tokens))
    assert result.step == 7
    assert result.seconds > 0
    assert [(c.session, c.epoch, c.computed, c.error) for c in result.chunks] == [
        ("a", 4, 20, ""),
        ("b", 0, 20, ""),
        ("c", 0, 5, ""),
    ]
    assert result.chunks[1].sampled is None
    first = result.chunks[0].sampled
    assert first == Sampled(int(engine.spy.rows["a"].argmax()))
    assert set(engine.spy.rows) == {"a", "c"}, "only sampled rows become logits"


def test_an_empty_plan_and_a_plan_of_copies(engine: Engine) -> None:
    assert engine.executor.run(plan()).chunks == ()
    engine.pool.storages[0][3] = 1.0
    engine.executor.run(plan(copies=(PageCopy(0, 3, 5, 16), PageCopy(0, 5, 6, 2))))
    assert bool((engine.pool.storages[0][6, :, :, :2] == 1.0).all()), "copies run in order"
    assert bool(engine.pool.storages[0][6, :, :, 2:].isnan().all())


@pytest.mark.parametrize(
    "copy", [PageCopy(1, 0, 1, 4), PageCopy(0, 24, 1, 4), PageCopy(0, 0, -1, 4), PageCopy(0, 0, 1, 17)]
)
def test_a_copy_outside_the_pool_fails_the_step(engine: Engine, copy: PageCopy) -> None:
    with pytest.raises(ValueError, match="page copy"):
        engine.executor.run(plan(copies=(copy,)))


def wrong_chunks(engine: Engine) -> list[tuple[Chunk, str]]:
    good = whole(engine)
    table = good.tables[0]
    return [
        (replace(good, tokens=array("i")), "no tokens"),
        (replace(good, tokens=array("i", [0, VOCAB])), "outside the vocabulary of 96"),
        (replace(good, tokens=array("i", [-1])), "outside the vocabulary of 96"),
        (replace(good, start=-1), "leave the context"),
        (replace(good, start=510), "positions 510 to 529 leave the context of 512 tokens"),
        (replace(good, tables=()), "0 page tables for 1 KV groups"),
        (replace(good, tables=(table[:1],)), "1 pages for 20 tokens, 2 needed"),
        (replace(good, tables=(array("i", [0, 24]),)), "outside the pool of 24"),
        (replace(good, tables=(array("i", [-1, 0]),)), "outside the pool of 24"),
    ]


def test_a_wrong_chunk_is_its_own_error_only(engine: Engine) -> None:
    engine.run(whole(engine))
    alone = engine.spy.rows["s"]
    for chunk, message in wrong_chunks(engine):
        good = whole(engine)
        bad, fine = engine.executor.run(plan(chunk, good)).chunks
        assert message in bad.error
        assert "\n" not in bad.error
        assert (bad.computed, bad.sampled) == (0, None)
        assert (fine.error, fine.computed) == ("", 20)
        assert torch.equal(engine.spy.rows["s"], alone)
        engine.free(good.tables)


def test_an_output_that_is_not_finite_is_that_chunks_error(engine: Engine) -> None:
    """Token 95's embedding is broken: whoever reads it fails, sampled or not, also in an earlier pass."""
    config = config_of()
    weights = weights_of(config)
    weights.embedding[95] = float("inf")
    broken = Engine(config, weights, pages=24, most_rows=8, ops=ReferenceOps(CPU))
    engine.run(whole(engine))
    bad_tokens = [95, *TOKENS[1:]]
    bad = broken.chunk("bad", bad_tokens, 0, len(TOKENS), broken.tables(len(TOKENS)))
    silent = replace(bad, tables=broken.tables(len(TOKENS)), sample=None)
    results = broken.executor.run(plan(whole(broken), bad, silent)).chunks
    assert [r.error for r in results] == [
        "",
        "the model's output is not finite",
        "the model's output is not finite",
    ]
    assert [r.sampled is None for r in results] == [False, True, True]
    assert torch.equal(broken.spy.rows["s"], engine.spy.rows["s"])
    assert set(broken.spy.rows) == {"s"}


def test_logits_that_are_not_finite_are_that_chunks_error() -> None:
    """The hidden states are fine, but one's product with the head overflows."""
    config = config_of()
    weights = weights_of(config)
    engine = Engine(config, weights, pages=24, ops=ReferenceOps(CPU))
    weights.lm_head[: config.hidden_size] = torch.eye(config.hidden_size)  # logits show the hidden state
    engine.run(whole(engine), engine.chunk("t", TOKENS, 0, 7, engine.tables(7)))
    hidden, other = engine.spy.rows["s"].abs(), engine.spy.rows["t"].abs()
    place = int((hidden - other)[: config.hidden_size].argmax())
    assert hidden[place] > 1.5 * other[place]
    weights.lm_head[0] = 0.0
    weights.lm_head[0, place] = 3.0e38 / float(hidden[place]) * 1.3
    chunks = whole(engine), engine.chunk("t", TOKENS, 0, 7, engine.tables(7)), whole(engine)
    bad, fine, _ = engine.executor.run(plan(*chunks)).chunks
    assert (bad.error, bad.sampled) == ("the model's output is not finite", None)
    assert fine.error == ""
    assert fine.sampled is not None


def test_the_kernels_say_which_kv_they_keep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(engine.config, [4], 16, torch.int8)
    monkeypatch.setattr(engine.decoder.ops, "kv_dtypes", lambda dtype: frozenset({dtype}))
    message = r"reference kernels cannot keep KV in torch.int8 for a model in torch.float32"
    with pytest.raises(ValueError, match=message):
        TorchExecutor(engine.decoder, pool, engine.spy)
    TorchExecutor(engine.decoder, engine.pool, engine.spy)
    monkeypatch.setattr(engine.decoder.ops, "kv_dtypes", lambda dtype: frozenset({dtype, torch.int8}))
    TorchExecutor(engine.decoder, pool, engine.spy)
    with pytest.raises(ValueError, match="most_rows"):
        TorchExecutor(engine.decoder, engine.pool, engine.spy, most_rows=0)


def test_split_rows() -> None:
    assert split_rows([], 4) == []
    assert split_rows([3, 6, 1, 2], 4) == [
        [Piece(0, 0, 3), Piece(1, 0, 1)],
        [Piece(1, 1, 4)],
        [Piece(1, 5, 1), Piece(2, 0, 1), Piece(3, 0, 2)],
    ]


def test_groups_and_pages_of_a_pool() -> None:
    config = config_of("qwen2-windows")
    groups = kv_groups(config, 16, torch.bfloat16)
    assert [(g.name, g.layers, g.window) for g in groups] == [("full", (0,), None), ("window-20", (1, 2), 20)]
    assert [g.page_bytes for g in groups] == [2 * 16 * 2 * 8 * 2, 2 * 2 * 16 * 2 * 8 * 2]
    pool = KVPool(config, [3, 5], 16, torch.bfloat16)
    assert pool.groups == groups
    assert pool.pages == (3, 5)
    assert pool.nbytes == 3 * groups[0].page_bytes + 5 * groups[1].page_bytes
    assert pool.storages[1][4].is_contiguous(), "a page is one run of bytes"
    assert pool.storages[0].shape == (3, 1, 2, 16, 2, 8)
    with pytest.raises(ValueError, match="page count"):
        KVPool(config, [3], 16, torch.bfloat16)
    with pytest.raises(ValueError, match="page count"):
        KVPool(config, [3, 0], 16, torch.bfloat16)


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_a_pool_in_other_numbers(dtype: torch.dtype) -> None:
    """8-bit KV keeps a float32 scale per token and head behind its numbers."""
    config = config_of("qwen2-windows")
    groups = kv_groups(config, 16, dtype)
    pool = KVPool(config, [3, 5], 16, dtype)
    per_token = 2 * 2 * ((8 + 4) if dtype == torch.int8 else 8 * dtype.itemsize)  # K and V, two heads
    assert [group.page_bytes for group in groups] == [16 * per_token, 2 * 16 * per_token]
    assert pool.nbytes == 3 * groups[0].page_bytes + 5 * groups[1].page_bytes
    assert {storage.dtype for storage in pool.storages} == {dtype}
    assert pool.storages[1].stride(0) * dtype.itemsize == groups[1].page_bytes


def test_a_row_that_gives_no_token_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = engine.spy.sample

    def two_fail(logits: Logits, specs: list) -> list:  # type: ignore[type-arg]
        found = list(sample(logits, specs))
        return [found[0], NotSampled("why"), NotSampled("its own fault", refused=True)]

    monkeypatch.setattr(engine.spy, "sample", two_fail)
    chunks = engine.executor.run(plan(*(whole(engine, name) for name in "abc"))).chunks
    assert [(chunk.error, chunk.sampled is None, chunk.refused) for chunk in chunks] == [
        ("", False, False),
        ("why", True, False),
        ("its own fault", True, True),
    ]


def test_it_says_once_per_run_when_the_model_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    engine = Engine(config, weights_of(config), pages=24, most_rows=8, ops=ReferenceOps(CPU))
    happened: list[str] = []
    forward = engine.decoder.forward
    monkeypatch.setattr(engine.decoder, "forward", lambda batch: happened.append("pass") or forward(batch))
    engine.executor.when_computing(lambda: happened.append("computing"))
    engine.executor.run(plan(whole(engine)))
    assert happened == ["computing", "pass", "pass", "pass"]
    happened.clear()
    engine.executor.run(plan(replace(whole(engine), tokens=array("i"))))
    assert not happened, "nothing can run: nobody computes"


def test_where_kernels_are_only_launched_it_says_so_when_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    engine = Engine(config, weights_of(config), pages=24, most_rows=8, ops=ReferenceOps(CPU))
    happened: list[str] = []
    engine.decoder.device = torch.device("cuda")
    executor = TorchExecutor(engine.decoder, engine.pool, engine.spy, most_rows=8)
    for name in ("forward", "logits"):
        told = getattr(engine.decoder, name)
        monkeypatch.setattr(
            engine.decoder, name, lambda x, name=name, told=told: happened.append(name) or told(x)
        )
    executor.when_computing(lambda: happened.append("computing"))
    executor.run(plan(whole(engine)))
    assert happened == ["forward", "forward", "forward", "logits", "computing"]


def test_python_is_free_while_kernels_run() -> None:
    """What ctypes calls without Python's lock, for all functions of the compiled kernels."""
    found = ops_for(CPU)
    if not isinstance(found, CpuOps):
        pytest.skip("no compiled kernels on this machine")
    functions = [each for each in vars(found._library).values() if isinstance(each, ctypes._CFuncPtr)]
    assert len(functions) > 10
    assert not any(each._flags_ & ctypes._FUNCFLAG_PYTHONAPI for each in functions)
