"""What rounding costs on SmolLM2, as bounds that damage breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch

from agentserve.bench.quality import (
    BF16_REFERENCE,
    EXACT,
    VARIANTS,
    Finding,
    Reader,
    Text,
    Variant,
    kv_dtype,
)
from agentserve.bench.quality_reading import logits, predicted, read, windows
from agentserve.models.load import DTYPES, LoadedModel, open_model
from agentserve.models.source import resolve
from agentserve.text import load
from kernels import ops_for
from kernels.blocks import BlockMatrix, BlockRows
from kernels.reference import ReferenceOps
from tests.cpu_builds import compiler
from tests.parity.harness import CPU, Engine, greedy

pytestmark = pytest.mark.model

FILE = Path(__file__).parents[2] / "benchmarks" / "text" / "harbour.txt"
PAGE_SIZE = 16
GENERATED = 48
SOON = 16  # tokens after which damage has shown
PROMPTS = (
    "The harbour at Saltmere now has",
    "def predict(coefficients, hours):\n",
    '<tool_call>\n{"name": "get_weather", "arguments": {',
)

FP32_STORED = Variant("fastest", "fp32", "stored")
BF16_STORED = Variant("fastest", "bf16", "stored")
BF16_EXPANDED = Variant("fastest", "bf16", "expanded")
INT8_KV = Variant("fastest", "bf16", "stored", kv_dtype="int8")
INT8_ACTIVATIONS = Variant("fastest", "bf16", "stored", "int8")
ALL_INT8 = Variant("fastest", "bf16", "stored", "int8", "int8")

MEASURED = {
    Variant("fastest", "fp32", "expanded"): 4.1e-11,
    FP32_STORED: 1.3e-11,
    Variant("fastest", "fp32", "stored", "int8"): 2.2e-3,
    BF16_REFERENCE: 1.2e-3,
    BF16_EXPANDED: 2.0e-4,
    BF16_STORED: 1.4e-4,
    Variant("fastest", "bf16", "stored", kv_dtype="fp16"): 1.2e-4,
    INT8_KV: 9.4e-4,
    INT8_ACTIVATIONS: 2.6e-3,
    ALL_INT8: 3.4e-3,
}
"""Mean KL from the exact model on `text`, in nats."""
MARGIN = 3.0


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compiler()
    assert not isinstance(ops_for(CPU), ReferenceOps)


@pytest.fixture(scope="module")
def encode() -> Callable[[str], list[int]]:
    return load(resolve("smollm2-135m").path).tokenizer.encode_completion


@pytest.fixture(scope="module")
def text(encode: Callable[[str], list[int]]) -> Text:
    """Some prose and some of the tool calls."""
    whole = FILE.read_text(encoding="utf-8")
    calls = whole.index("User: Good evening.")
    return Text("", [*encode(whole)[:96], *encode(whole[calls:])[:96]])


@pytest.fixture(scope="module")
def models() -> Callable[[Variant], LoadedModel]:
    """The model with the weights that a variant names."""
    opened = open_model(resolve("smollm2-135m"))

    @cache
    def loaded(dtype: str, weights: Literal["expanded", "stored"]) -> LoadedModel:
        return opened.load(DTYPES[dtype], CPU, weights)

    return lambda variant: loaded(variant.dtype, variant.weights)


@pytest.fixture(scope="module")
def reader(text: Text) -> Reader:
    return Reader(windows(text.tokens), PAGE_SIZE)


@pytest.fixture(scope="module", autouse=True)
def exact(reader: Reader, models: Callable[[Variant], LoadedModel]) -> Finding:
    """Of the exact model, which the reader compares all others with."""
    found = reader.read(models(EXACT), EXACT)
    assert isinstance(found, Finding)
    return found


@pytest.fixture(scope="module")
def findings(
    exact: Finding, reader: Reader, models: Callable[[Variant], LoadedModel]
) -> dict[Variant, Finding]:
    found = [exact, *(reader.read(models(variant), variant) for variant in VARIANTS if variant != EXACT)]
    return {finding.variant: finding for finding in found if isinstance(finding, Finding)}


def test_all_variants_are_there(findings: dict[Variant, Finding]) -> None:
    assert set(findings) == set(VARIANTS) == {EXACT, *MEASURED}


def test_the_text_is_one_that_the_model_can_read(findings: dict[Variant, Finding]) -> None:
    assert 5 < findings[EXACT].perplexity < 40
    assert findings[EXACT].from_exact is None


@pytest.mark.parametrize("variant", MEASURED, ids=str)
def test_the_divergence_is_as_measured(variant: Variant, findings: dict[Variant, Finding]) -> None:
    """Not above the bound; nor far below it, as where an option had no effect."""
    found = findings[variant].from_exact
    assert found is not None
    assert MEASURED[variant] / MARGIN**2 < found.kl_mean < MEASURED[variant] * MARGIN
    assert abs(findings[variant].perplexity / findings[EXACT].perplexity - 1) < 0.02


def test_float32_of_stored_blocks_is_the_exact_model(findings: dict[Variant, Finding]) -> None:
    found = findings[FP32_STORED].from_exact
    assert found is not None
    assert found.top1_agreement == 1.0
    assert found.kl_max < 1e-8
    assert found.largest_difference < 1e-3


def test_bf16_is_nearer_to_the_exact_model_than_the_reference_backends(
    findings: dict[Variant, Finding],
) -> None:
    """Not the same bits: the reference rounds to bf16 after every operation, the C++ backend does not."""
    ours, theirs = findings[BF16_EXPANDED], findings[BF16_REFERENCE]
    assert ours.from_exact is not None
    assert theirs.from_exact is not None
    assert ours.from_bf16_reference is not None
    assert ours.from_exact.kl_mean < theirs.from_exact.kl_mean
    assert ours.from_bf16_reference.kl_mean < 3 * theirs.from_exact.kl_mean


def damaged(model: LoadedModel, layers: range, factor: float) -> LoadedModel:
    """The scales of gates and ups of some layers (float16 at the start of every block) off by a factor."""

    def wrong(matrix: BlockMatrix) -> BlockMatrix:
        runs = []
        for run in matrix.runs:
            blocks = run.data.clone().view(-1, run.format.nbytes)
            scales = blocks[:, :2].contiguous().view(torch.float16)
            blocks[:, :2] = (scales * factor).view(torch.uint8)
            runs.append(BlockRows(run.format, blocks.view(run.data.shape)))
        return BlockMatrix(tuple(runs), matrix.width)

    parts = list(model.weights.layers)
    for number in layers:
        gate_up = parts[number].gate_up
        assert isinstance(gate_up, BlockMatrix)
        parts[number] = replace(parts[number], gate_up=wrong(gate_up))
    return replace(model, weights=replace(model.weights, layers=tuple(parts)))


@pytest.mark.parametrize(
    ("variant", "factor"),
    [(FP32_STORED, 1.002), (BF16_STORED, 1.02), (INT8_KV, 1.02), (INT8_ACTIVATIONS, 1.05), (ALL_INT8, 1.05)],
    ids=str,
)
def test_wrong_scales_in_one_layer_would_show(
    variant: Variant, factor: float, reader: Reader, models: Callable[[Variant], LoadedModel]
) -> None:
    found = reader.read(damaged(models(variant), range(29, 30), factor), variant)
    assert isinstance(found, Finding)
    assert found.from_exact is not None
    assert found.from_exact.kl_mean > MEASURED[variant] * MARGIN


@pytest.mark.parametrize("variant", [FP32_STORED, BF16_STORED, ALL_INT8], ids=str)
def test_windows_together_or_one_by_one_have_the_same_bits(
    variant: Variant, text: Text, reader: Reader, models: Callable[[Variant], LoadedModel]
) -> None:
    cut = windows(text.tokens[:160], 60)
    assert [len(window) for window in cut] == [60, 60, 40]
    decoder = reader.decoder(models(variant), variant)
    kept = kv_dtype(variant)
    alone = read(decoder, kept, cut, PAGE_SIZE)
    assert alone.shape == (len(predicted(cut)), decoder.config.hidden_size)
    for together, most_rows, page_size in ((4, 512, 16), (3, 50, 16), (2, 512, 7)):
        assert torch.equal(read(decoder, kept, cut, page_size, together=together, most_rows=most_rows), alone)
    whole = torch.cat(list(logits(decoder, alone)))
    assert torch.equal(torch.cat(list(logits(decoder, alone, rows=7))), whole)
    assert not torch.equal(read(decoder, kept, windows(text.tokens[:160], 70), PAGE_SIZE), alone)


def test_greedy_tokens_of_stored_blocks_are_the_exact_ones(
    encode: Callable[[str], list[int]], reader: Reader, models: Callable[[Variant], LoadedModel]
) -> None:
    """Each token is the exact model's own greedy choice after the same ids."""
    stored = models(FP32_STORED)
    prompts = [encode(prompt) for prompt in PROMPTS]
    histories = greedy(Engine(stored.config, stored.weights), prompts, GENERATED)
    decoder = reader.decoder(models(EXACT), EXACT)
    hidden = read(decoder, torch.float32, histories, PAGE_SIZE)
    choices = torch.cat([part.argmax(dim=-1) for part in logits(decoder, hidden)])
    parts = torch.split(choices, [len(history) - 1 for history in histories])
    for prompt, history, choice in zip(prompts, histories, parts, strict=True):
        continuation = history[len(prompt) :]
        assert len(set(continuation)) > 12, "degenerate text proves little"
        assert choice[-GENERATED:].tolist() == continuation
    wrong = Engine(stored.config, damaged(stored, range(30), 1.02).weights)
    assert greedy(wrong, prompts, SOON) != [history[: SOON - GENERATED] for history in histories]
