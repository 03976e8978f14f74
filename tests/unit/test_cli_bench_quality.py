"""`agentserve bench quality`: its table, its file, and how it says what is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from agentserve.bench import quality, report
from agentserve.bench.quality import BF16_REFERENCE, EXACT, Finding, LeftOut, Quality, Text, Variant
from agentserve.bench.quality_scores import Divergence
from agentserve.cli.bench_quality import TEXT, variant_name
from agentserve.cli.main import app

SMALL = Divergence(0.00123, 0.0456, 0.789, 0.9876, 1.25, 0.0)
BESIDE = Divergence(0.00321, 0.0654, 0.987, 0.9567, 2.5, 0.0)
INT8 = Variant("fastest", "bf16", "stored", "int8", "int8")


def measured(text: Text) -> Quality:
    bf16 = Variant("fastest", "bf16", "expanded")
    findings = [
        Finding(EXACT, "reference", 13.25, None, None),
        Finding(bf16, "cpu-avx2", 13.5, SMALL, BESIDE),
    ]
    left = [LeftOut(INT8, "there is a reason")]
    return Quality("m", "0" * 64, ("Q4_1",), text.digest, len(text.tokens), 7, 1024, findings, left)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """Texts that were to be measured; no model is run."""
    texts: list[Text] = []

    def measure(source: object, text: Text, page_size: int, found: object) -> Quality:
        texts.append(text)
        return measured(text)

    monkeypatch.setattr(quality, "measure", measure)
    monkeypatch.setattr(report, "versions", dict)  # the distribution need not be installed here
    return texts


@pytest.mark.model
def test_table_and_file(seen: list[Text], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "quality", "--threads", "1", "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["bf16", "expanded", "13.5000", "0.0012", "0.046", "0.79", "98.76%", "1.2"] in lines
    assert ["against", "the", "reference's", "bf16", "0.0032", "0.065", "0.99", "95.67%", "2.5"] in lines
    assert "left out: bf16 stored, int8 act., int8 KV: there is a reason" in result.output
    stored = msgspec.json.decode((tmp_path / "quality.json").read_bytes())
    assert stored["benchmark"] == "quality"
    assert stored["found"]["findings"][1]["from_exact"]["kl_mean"] == 0.00123
    assert stored["found"]["text"] == seen[0].digest
    assert len(seen[0].tokens) > 4000, "the repository's own text"


@pytest.mark.model
def test_a_text_of_ones_own(seen: list[Text], tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Nine words that are not in the repository's text.", encoding="utf-8")
    assert CliRunner().invoke(app, ["bench", "quality", "--text", str(own)]).exit_code == 0
    assert 5 < len(seen[0].tokens) < 20


@pytest.mark.model
@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"abc\xff", "not UTF-8"), (b"", "nothing to predict")]
)
def test_a_bad_text_is_one_line(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["bench", "quality", "--text", str(path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("agentserve: ")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_model_is_one_line() -> None:
    result = CliRunner().invoke(app, ["bench", "quality", "--model", "/no/such/model"])
    assert result.exit_code == 1
    assert "no such file or folder" in result.stderr
    assert result.stderr.count("\n") == 1


def test_names() -> None:
    assert variant_name(INT8) == "bf16 stored, int8 act., int8 KV"
    assert variant_name(BF16_REFERENCE) == "bf16 expanded, reference"


def test_the_text_is_in_the_repository() -> None:
    assert (Path(__file__).parents[2] / TEXT).is_file()
