"""`agentserve bench kernels` as a whole: every row on a tiny model, its table and its file."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import gguf
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentserve.bench import report
from agentserve.bench.kernels import pages, run
from agentserve.bench.kernels.cases import Case, Findings
from agentserve.bench.kernels.sizes import Sizes
from agentserve.bench.kernels.subject import ALL, Choice
from agentserve.bench.kernels.timing import Effort, Rates, Stopwatch
from agentserve.bench.report import Row
from agentserve.cli.bench_kernels import show
from agentserve.cli.main import app
from agentserve.config import load
from agentserve.values import ConfigError
from kernels.cpu import cpu_ops
from kernels.cpu.isa import available
from kernels.cpu.ops import CpuOps
from tests.parity.harness import write_model
from tests.unit.test_models_gguf import model
from tests.unit.test_models_gguf_blocks import write as write_gguf

Kind = gguf.GGMLQuantizationType
TINY = Sizes(
    products=(1, 5),
    stream=1 << 16,
    attended=(1, 2),
    chunks=((0, 20), (16, 16)),
    operations=(1, 3),
    sampled=3,
    decoded=(1, 3),
    contexts=(20, 40),
    alone=(30,),
    prefilled=(20, 50),
    chunked=(50,),
    chunk=16,
    sharing=(3, 32, 16),
    overhead=(1, 3),
    read=1 << 20,
)
ONCE = Effort(runs=2, most=2, seconds=0.0, total=1e9)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "llama-tied-mha")
    return run.measure(run.Settings(str(folder), "fp32", ALL, sizes=TINY, effort=ONCE))


def test_a_run_gives_every_row(findings: Findings) -> None:
    names = {(row.group, row.name) for row in findings.rows}
    assert len(names) == len(findings.rows), "one variant: a folder has no blocks"
    counts = {
        group: sum(row.group == group for row in findings.rows)
        for group in ("products", "attention", "operations", "decode step", "shared prefix", "prefill")
    }
    assert counts == {
        "products": 5 * 2,
        "attention": 2 * 2 + 2,
        "operations": 4 * 2 + 1 + 2,
        "decode step": 2 * 2 + 1,
        "shared prefix": 6,
        "prefill": 3,
    }
    assert ("machine", "memory read") in names
    assert all(row.value > 0 and len(row.runs) >= 1 for row in findings.rows)
    limited = [row for row in findings.rows if row.group not in ("machine", "shared prefix")]
    assert all(row.limit and row.fraction for row in limited)


def test_what_a_model_has_not_is_said(findings: Findings) -> None:
    reason = "the model's layers have no quantised blocks"
    assert findings.skipped["weights stored, activations int8"] == reason
    assert findings.skipped["weights stored, activations float"] == reason


def test_the_table_shows_every_row_and_the_file_keeps_every_run(findings: Findings, tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    show(findings, console)
    shown = console.export_text()
    assert all(row.name in shown for row in findings.rows)
    assert "not measured: weights stored, activations int8" in shown
    document = report.Report("kernels", "x", {}, {}, findings.rows, findings.notes, findings.skipped)
    stored = json.loads(report.write(document, tmp_path).read_bytes())
    assert stored["skipped"] == findings.skipped
    for kept, row in zip(stored["rows"], findings.rows, strict=True):
        assert kept["runs"] == pytest.approx(row.runs)
        assert kept["fraction"] == pytest.approx(row.fraction)
        assert min(row.runs) <= kept["value"] <= max(row.runs)


def test_a_pool_too_small_leaves_rows_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "llama-tied-mha")
    page = 16 * 2 * 6 * 16 * 4 * 3
    monkeypatch.setattr(pages, "available_memory", lambda: pages.SPARE + int(8.5 * page / pages.POOL_SHARE))
    small = replace(TINY, products=(1,), operations=(), contexts=(20, 40), sharing=(3, 32, 16))
    found = run.measure(run.Settings(str(tmp_path / "model"), "fp32", ALL[:1], sizes=small, effort=ONCE))
    assert "decode step: 3 x 40 tokens" in found.skipped
    assert "shared prefix: 3 x 48 tokens" in found.skipped
    assert [row.name for row in found.rows if row.group == "decode step"] == [
        "1 x 20 tokens", "3 x 20 tokens", "1 x 40 tokens", "1 x 30 tokens",
    ]  # fmt: skip
    monkeypatch.setattr(pages, "available_memory", lambda: pages.SPARE)
    with pytest.raises(ValueError, match="too little memory"):
        run.measure(run.Settings(str(tmp_path / "model"), "fp32", ALL[:1], sizes=small, effort=ONCE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": (Choice("stored", "float"),)}, "weights stored, activations float: the model's layers"),
        ({"sizes": replace(TINY, contexts=(512, 9000))}, "a model of 512 positions is too short"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
def test_errors_are_one_line(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama-tied-mha")
    settings = replace(
        run.Settings(str(tmp_path / "model"), "fp32", ALL[:1], sizes=TINY, effort=ONCE),
        **changes,  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError, match=message) as caught:
        run.measure(settings)
    assert "\n" not in str(caught.value)


def test_a_short_models_sizes_are_those_that_it_can_run() -> None:
    short = Sizes().within(2200)
    assert short.contexts == (64, 2048)
    assert short.alone == ()
    assert short.prefilled == (128, 512, 2048)
    assert short.chunked == (2048,)
    assert short.chunks == ((0, 256), (1792, 256), (0, 2048))
    assert short.sharing is None
    assert short.longest == 2049
    assert Sizes().within(8192) == Sizes()
    assert Sizes().longest == 6145


def test_blocks_as_stored_run_beside_expanded_ones(tmp_path: Path) -> None:
    _, _, stored = model()
    write_gguf(tmp_path / "m.gguf", stored, lambda name: Kind.Q8_0 if "token_embd" in name else Kind.Q4_1)
    sizes = replace(TINY, products=(2,), operations=(), attended=(1,), contexts=(20,), decoded=(1,))
    settings = run.Settings(str(tmp_path / "m.gguf"), "bf16", ALL, sizes=sizes, effort=ONCE)
    found = run.measure(settings)
    variants = {row.variant for row in found.rows if row.group == "decode step"}
    assert variants == {"bf16", "Q4_1", "Q4_1 int8"}
    assert "int8 matrix product, operands in cache" in {row.name for row in found.rows}
    assert found.skipped == {}
    for group in ("products", "decode step", "prefill", "shared prefix"):
        rows = [row for row in found.rows if row.group == group and not row.name.startswith("attention")]
        names = {variant: [row.name for row in rows if row.variant == variant] for variant in variants}
        assert names["bf16"]
        assert all(given == names["bf16"] for given in names.values()), "side by side"
    limits = {row.variant: row.limit for row in found.rows if row.group == "decode step"}
    assert limits["Q4_1"] is not None
    assert limits["bf16"] is not None
    assert limits["Q4_1"] < limits["bf16"], "fewer bytes"


def test_the_command_says_in_one_line_what_it_cannot_do(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--model", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("agentserve: ")
    with pytest.raises(ConfigError, match="weights"):
        load({"weights": "expanded", "activations": "int8"}, None)
    refused = CliRunner().invoke(app, ["bench", "kernels", "--weights", "expanded", "--activations", "int8"])
    assert isinstance(refused.exception, ConfigError)


def test_the_table_marks_what_ran_once() -> None:
    once = Row("a", 2.0, "ms", 1.0, "memory", runs=(2.0,), group="decode step")
    twice, machine = {"name": "b", "runs": (2.0, 2.0)}, {"name": "c", "group": "machine"}
    rows = [once, *(msgspec.structs.replace(once, **changes) for changes in (twice, machine))]
    console = Console(width=200, record=True, file=io.StringIO())
    show(Findings(rows=rows), console)
    lines = {line.split()[0]: line.rstrip() for line in console.export_text().splitlines() if line.strip()}
    assert lines["a"].endswith("50% memory, 1 run")
    assert lines["b"].endswith("50% memory")
    assert lines["c"].endswith("50% memory")


def test_what_is_late_among_products_and_operations_is_left_out(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama-tied-mha")
    late = replace(ONCE, stop=-1.0)
    found = run.measure(run.Settings(str(tmp_path / "model"), "fp32", ALL[:1], sizes=TINY, effort=late))
    assert {row.group for row in found.rows} == {"machine"}
    groups = {name.partition(": ")[0] for name in found.skipped}
    assert {"products", "attention", "operations", "decode step", "prefill"} <= groups
    assert set(found.skipped.values()) >= {"the time was up"}


def test_what_does_not_fit_or_comes_too_late_is_left_out_and_said() -> None:
    row = Row("a", 1.0, "ms")
    ran: list[str] = []

    def case(name: str, fits: bool = True) -> Case:
        return Case("group", name, lambda: ran.append(name) or [row], fits)  # type: ignore[func-returns-value]

    seconds = iter([0.0, 1.0, 164.0, 166.0, 170.0])
    watch = Stopwatch(NoGauge(), Effort(stop=165.0), lambda: next(seconds))
    found = Findings()
    found.add(
        [case("first"), case("large", fits=False), case("second"), case("third"), case("fourth")], watch
    )
    assert ran == ["first", "second"]
    assert found.rows == [row, row]
    assert found.skipped == {
        "group: large": "too little memory for its KV",
        "group: third": "the time was up",
        "group: fourth": "the time was up",
    }


class NoGauge:
    def rates(self) -> Rates:
        raise AssertionError("nothing is timed")


def test_a_kv_dtype_that_the_backend_has_not_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuOps, "kv_dtypes", lambda self, dtype: frozenset({dtype}))
    monkeypatch.setattr(run, "ops_for", lambda device: cpu_ops([next(available())]))
    heard: list[str] = []
    with pytest.raises(ValueError, match=r"--kv-dtype fp16: cpu-.* kernels cannot keep it for bf16 models"):
        run.measure(run.Settings("/nowhere", kv_dtype="fp16"), heard.append)
    assert heard == []
