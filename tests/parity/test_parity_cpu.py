"""The whole forward pass in C++ against its own single operations, the reference, and transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from agentserve.models.config import DecoderConfig
from agentserve.models.decoder import ComposedDecoder, Decoder
from agentserve.models.hf_config import hf_config
from agentserve.models.load import LoadedModel, load_model
from agentserve.models.source import resolve
from agentserve.models.weights import DecoderWeights, random_weights
from kernels.cpu import cpu_ops
from kernels.cpu.ops import CpuOps
from kernels.ops import DecoderParts, Ops, StepDecoder
from kernels.reference import ReferenceOps
from tests.cpu_builds import CHECKED, builds
from tests.parity.harness import ARCHITECTURES, CPU, VOCAB, Case, Engine, config_json, make_case

TOLERANCE = 1e-4


ops = builds(CHECKED)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Composed(CpuOps):
    """The backend without its whole step: every decoder is composed of single operations."""

    def decoder(self, parts: DecoderParts) -> StepDecoder | None:
        return None


@dataclass(frozen=True)
class Model:
    config: DecoderConfig
    weights: DecoderWeights

    def engine(self, ops: Ops, pages: int = 64, page_size: int = 16) -> Engine:
        engine = Engine(self.config, self.weights, pages=pages, page_size=page_size)
        engine.decoder = Decoder(self.config, self.weights, ops, positions=4096)
        engine.executor._decoder = engine.decoder
        return engine


def tiny(name: str, dtype: torch.dtype) -> Model:
    config = hf_config(config_json(name), name)
    return Model(config, random_weights(config, 3, std=0.25, dtype=dtype))


def history(length: int, vocab: int = VOCAB) -> list[int]:
    return random.Random(length).choices(range(vocab), k=length)


def largest(a: dict[int, Tensor], b: dict[int, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[at] - b[at]).abs().max()) for at in a)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("model") / "m", request.param)


def test_float32_equals_transformers(ops: CpuOps, case: Case) -> None:
    model = Model(case.config, case.weights)
    for sizes in ([len(case.tokens)], [1], [7, 30, 2], [16]):
        assert case.error(model.engine(ops).logits(case.tokens, sizes)) < TOLERANCE, sizes


@pytest.mark.parametrize(
    ("name", "page_size"),
    [*((name, 16) for name in ARCHITECTURES), ("llama", 1), ("qwen2-windows", 5), ("mistral-window", 64)],
)
def test_the_whole_step_is_the_sum_of_its_operations(ops: CpuOps, name: str, page_size: int) -> None:
    """In float32 nothing is rounded between operations, so that the bits agree."""
    model, tokens = tiny(name, torch.float32), history(90)
    whole = model.engine(ops, pages=99, page_size=page_size)
    composed = model.engine(Composed(ops._library), pages=99, page_size=page_size)
    assert isinstance(composed.decoder._step, ComposedDecoder)
    assert not isinstance(whole.decoder._step, ComposedDecoder)
    found = whole.logits(tokens, [33, 1, 20])
    expected = composed.logits(tokens, [33, 1, 20])
    for at, row in found.items():
        assert torch.equal(row, expected[at]), at


def test_bfloat16_is_as_near_to_float32_as_the_reference(ops: CpuOps) -> None:
    """Errors against float32 on the same (rounded) weights, averaged over positions and tokens."""
    rough = tiny("llama", torch.bfloat16)
    exact = Model(rough.config, random_weights(rough.config, 3, std=0.25))
    for mine, theirs in zip(_tensors(exact.weights), _tensors(rough.weights), strict=True):
        mine.copy_(theirs)
    tokens = history(150)

    def error(engine: Engine) -> float:
        found = engine.logits(tokens, [1])
        return sum(float((found[at] - truth[at]).abs().mean()) for at in truth) / len(truth)

    truth = exact.engine(ReferenceOps(CPU)).logits(tokens, [1])
    assert 0 < error(rough.engine(ops)) < error(rough.engine(ReferenceOps(CPU)))


def _tensors(weights: DecoderWeights) -> Iterator[Tensor]:
    yield from (weights.embedding, weights.norm, weights.lm_head)
    for layer in weights.layers:
        yield from (layer.attention_norm, layer.qkv, layer.o, layer.mlp_norm, layer.gate_up, layer.down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-windows", "llama-biased"])
def test_chunks_company_and_threads_leave_no_trace(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    model, tokens = tiny(name, dtype), history(500)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        cold = model.engine(ops, pages=128).logits(tokens, [100])
        torch.set_num_threads(2)
        for sizes in ([300, 1, 1, 98], [50], [25, 175]):
            engine = model.engine(ops, pages=128)
            found = run_with_mates(engine, tokens, sizes)
            for at in cold.keys() & found.keys():
                assert torch.equal(cold[at], found[at]), (sizes, at)
    finally:
        torch.set_num_threads(before)


def run_with_mates(engine: Engine, tokens: Sequence[int], sizes: Sequence[int]) -> dict[int, Tensor]:
    """Logits at each chunk's end; beside every chunk a session of one token and a short prompt."""
    tables = engine.tables(len(tokens))
    found: dict[int, Tensor] = {}
    start = turn = 0
    while start < len(tokens):
        end = min(len(tokens), start + sizes[turn % len(sizes)])
        mates = [history(1 + turn % 3), history(40)]
        held = [engine.tables(len(mate)) for mate in mates]
        others = [
            engine.chunk(f"mate{number}", mate, 0, len(mate), own)
            for number, (mate, own) in enumerate(zip(mates, held, strict=True))
        ]
        engine.run(others[0], engine.chunk("own", tokens, start, end, tables), others[1])
        found[end - 1] = engine.spy.rows["own"]
        for own in held:
            engine.free(own)
        start, turn = end, turn + 1
    return found


def test_sessions_that_share_their_prefix_keep_their_bits(ops: CpuOps) -> None:
    """Decoding together over the same pages gives what each gives alone."""
    model, prefix = tiny("llama", torch.bfloat16), history(470)
    engine = model.engine(ops, pages=128)
    shared = engine.tables(len(prefix))
    engine.logits(prefix, [200], shared)
    full = len(prefix) // 16
    sessions = []
    for number in range(5):
        own = engine.tables(64)
        tables = tuple(common[:full] + mine for common, mine in zip(shared, own, strict=True))
        tokens = [*prefix[: full * 16], *history(10 + number)]
        engine.logits(tokens[:-1], [9], tables, start=full * 16)
        sessions.append((tokens, tables))

    def last(number: int, name: str) -> object:
        tokens, tables = sessions[number]
        return engine.chunk(name, tokens, len(tokens) - 1, len(tokens), tables)

    engine.run(*(last(number, f"s{number}") for number in range(5)))  # type: ignore[arg-type]
    together = [engine.spy.rows[f"s{number}"] for number in range(5)]
    for number in range(5):
        engine.run(last(number, "alone"))  # type: ignore[arg-type]
        assert torch.equal(engine.spy.rows["alone"], together[number])


def test_the_original_weights_are_let_go(ops: CpuOps) -> None:
    """A packed decoder refers to none of the matrices that it was made of."""
    import gc
    import weakref

    model = tiny("llama", torch.bfloat16)
    matrices = [
        weakref.ref(tensor)
        for layer in model.weights.layers
        for tensor in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    decoder = Decoder(model.config, model.weights, ops)
    del model
    gc.collect()
    assert [matrix() for matrix in matrices] == [None] * len(matrices)
    assert decoder.parameters > 0


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model(resolve("smollm2-135m"), torch.bfloat16, CPU)


@pytest.mark.model
@pytest.mark.usefixtures("threads")
def test_smollm2_bits(smollm2: LoadedModel) -> None:
    """The real model, bfloat16, both thread counts: one history cut in several ways has the same bits."""
    model = Model(smollm2.config, smollm2.weights)
    tokens = random.Random(5).choices(range(1000, 40_000), k=330)
    engine = model.engine(cpu_ops(), pages=160)
    cold = engine.logits(tokens, [330])
    for sizes in ([1, 200, 129], [64], [256, 74], [300, 1, 1, 1, 1, 1, 25]):
        tables = engine.tables(len(tokens))
        found = engine.logits(tokens, sizes, tables)
        assert torch.equal(found[329], cold[329]), sizes
        engine.free(tables)
