"""A whole measurement on a tiny model in a folder: what is measured, what is left out, what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from agentserve.bench import quality
from agentserve.bench.quality import (
    BF16_REFERENCE,
    EXACT,
    VARIANTS,
    Finding,
    LeftOut,
    Quality,
    QualityReport,
    Reader,
    Text,
    Variant,
    measure,
)
from agentserve.bench.quality_reading import NotFinite, windows
from agentserve.bench.report import write
from agentserve.models.load import load_model, open_model
from agentserve.models.source import ModelSource
from kernels import ops_for
from kernels.reference import ReferenceOps
from tests.cpu_builds import compiler
from tests.parity.harness import CPU, VOCAB, write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder, "llama")
    return ModelSource("folder", folder, "tiny")


def text(length: int) -> Text:
    return Text("digest", random.Random(length).choices(range(VOCAB), k=length))


@pytest.fixture(scope="module")
def measured(source: ModelSource) -> Quality:
    compiler()
    assert not isinstance(ops_for(CPU), ReferenceOps)
    return measure(source, text(200), 16)


def test_a_model_without_blocks_leaves_out_what_is_about_blocks(measured: Quality) -> None:
    left = {found.variant: found.reason for found in measured.left_out}
    stored, int8 = "no block weights: stored and expanded", "8 activations are for block weights"
    for variant, reason in left.items():
        assert (int8 if variant.activations == "int8" else stored) in reason
    assert {found.variant for found in measured.findings} == {
        EXACT,
        Variant("fastest", "fp32", "expanded"),
        BF16_REFERENCE,
        Variant("fastest", "bf16", "expanded"),
        Variant("fastest", "bf16", "stored", kv_dtype="fp16"),
        Variant("fastest", "bf16", "stored", kv_dtype="int8"),
    }
    assert len(left) + len(measured.findings) == len(VARIANTS)
    assert (measured.formats, measured.tokens, measured.predicted) == ((), 200, 199)


def test_who_is_compared_with_whom(measured: Quality) -> None:
    for found in measured.findings:
        assert (found.from_exact is None) == (found.variant == EXACT)
        beside = found.variant == Variant("fastest", "bf16", "expanded")
        assert (found.from_bf16_reference is not None) == beside


def test_the_findings_differ_as_their_numbers_do(measured: Quality) -> None:
    mean = {found.variant: found.from_exact.kl_mean for found in measured.findings if found.from_exact}
    fp32, bf16 = mean[Variant("fastest", "fp32", "expanded")], mean[Variant("fastest", "bf16", "expanded")]
    assert 0 < fp32 < 1e-8 < bf16
    assert mean[Variant("fastest", "bf16", "stored", kv_dtype="int8")] not in (bf16, 0.0)


def test_each_finding_is_told_as_it_is_made(source: ModelSource) -> None:
    heard: list[Finding | LeftOut] = []
    found = measure(source, text(30), 16, (EXACT, BF16_REFERENCE), heard.append)
    assert heard == list(found.findings)
    assert [finding.backend for finding in found.findings] == ["reference", "reference"]
    assert found.findings == measure(source, text(30), 8, (EXACT, BF16_REFERENCE)).findings


def test_windows_are_no_longer_than_the_context(source: ModelSource) -> None:
    found = measure(source, text(700), 16, (EXACT,))
    assert open_model(source).config.max_position == 512
    assert (found.window, found.predicted) == (512, 511 + 187)
    reader = Reader(windows(text(700).tokens, 600), 16)
    with pytest.raises(ValueError, match="a window of 600 tokens, and a context of 512"):
        reader.read(load_model(source, torch.float32, CPU, "expanded"), EXACT)


def test_a_variant_that_predicts_nothing_is_left_out(source: ModelSource) -> None:
    good = load_model(source, torch.float32, CPU, "expanded")
    broken = replace(good, weights=replace(good.weights, norm=torch.full_like(good.weights.norm, torch.inf)))
    reader = Reader(windows(text(30).tokens), 16)
    with pytest.raises(NotFinite):
        reader.read(broken, EXACT)
    assert isinstance(reader.read(good, EXACT), Finding)
    variant = Variant("reference", "fp32", "stored")
    assert reader.read(broken, variant) == LeftOut(variant, "the model's output is not finite")


def test_what_is_written_can_be_read_again(measured: Quality, tmp_path: Path) -> None:
    report = QualityReport(command="c", machine={"cores": "2"}, versions={"torch": "2"}, found=measured)
    path = write(report, tmp_path / "results")
    assert path.name == "quality.json"
    assert msgspec.json.decode(path.read_bytes(), type=QualityReport).found.findings == measured.findings


def test_what_cannot_be_measured_is_refused(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the first variant must be the exact one"):
        measure(source, text(30), 16, VARIANTS[1:])
    with pytest.raises(ValueError, match="the text has 1 tokens: nothing to predict"):
        measure(source, text(1), 16)
    monkeypatch.setattr(quality, "available_memory", lambda: 2 * 2 * 4 * 29 * VOCAB - 1)
    with pytest.raises(ValueError, match=r"needs 21\.\d KiB for logits"):
        measure(source, text(30), 16, (EXACT,))
    monkeypatch.setattr(quality, "available_memory", lambda: 2 * 2 * 4 * 29 * VOCAB)
    measure(source, text(30), 16, (EXACT,))
