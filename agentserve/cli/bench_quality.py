"""`agentserve bench quality`: what rounding costs, on a text."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli.output import fail
from agentserve.config import load
from agentserve.machine import usable_cores

if TYPE_CHECKING:
    from agentserve.bench.quality import Finding, LeftOut, Quality, Variant
    from agentserve.bench.quality_scores import Divergence

TEXT = Path("benchmarks/text/harbour.txt")  # in the repository; not part of the installed package
_COLUMNS = ("perplexity", "KL mean", "99 %", "largest", "same top", "logits")
_WIDTH = 96  # of the table, where the terminal is narrower or none


def quality_bench(
    *,
    model: Annotated[str | None, typer.Option(show_default="smollm2-135m")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file.", show_default=str(TEXT))] = None,
    threads: Annotated[str | None, typer.Option(show_default="all cores")] = None,
    results: Annotated[Path | None, typer.Option(help="Write quality.json into this folder.")] = None,
) -> None:
    """What rounding costs: perplexity of a text, and the divergence from the exact model, per variant."""
    from agentserve.server.workers.supervisor import worker_environment

    # As in a worker: read by libgomp when torch loads it, so before that import.
    os.environ.update(worker_environment())
    import torch

    from agentserve.bench import quality, report
    from agentserve.models.source import resolve
    from agentserve.server.workers.spec import worker_spec
    from agentserve.text import load as load_text

    settings = load({"model": model, "threads": threads}, None)
    spec = worker_spec(settings, 0, "", os.getpid(), usable_cores())
    torch.set_num_threads(spec.threads)
    try:
        source = resolve(spec.model)
        encode = load_text(source.path).tokenizer.encode_completion
        read = quality.Text.of(_read(text), encode)
        measured = quality.measure(source, read, spec.page_size, found=_tell)
    except (ValueError, OSError) as error:
        fail(str(error))
    _show(measured)
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        machine, versions = report.machine(), report.versions()
        stored = quality.QualityReport(command=command, machine=machine, versions=versions, found=measured)
        typer.echo(f"written to {report.write(stored, results)}")


def _read(text: Path | None) -> str:
    path = text or Path(__file__).parents[2] / TEXT
    if text is None and not path.is_file():
        raise ValueError(f"{TEXT} is in the repository only: name a text with --text FILE")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _tell(result: Finding | LeftOut) -> None:
    """One line as each variant is done: the whole takes a minute or more."""
    from agentserve.bench.quality import Finding

    name = variant_name(result.variant)
    if isinstance(result, Finding):
        typer.echo(f"{name}: perplexity {result.perplexity:.4f}", err=True)
    else:
        typer.echo(f"{name}: left out, {result.reason}", err=True)


def variant_name(variant: Variant) -> str:
    """As tables show it, like "bf16 stored, int8 KV"; the fastest backend goes unnamed."""
    name = f"{variant.dtype} {variant.weights}"
    if variant.backend == "reference":
        name += ", reference"
    if variant.activations != "float":
        name += f", {variant.activations} act."
    if variant.kv_dtype != "as computed":
        name += f", {variant.kv_dtype} KV"
    return name


def _show(measured: Quality) -> None:
    typer.echo(
        f"{measured.model}: {measured.predicted:,} of {measured.tokens:,} tokens predicted, all but the "
        f"first of each window of {measured.window:,}, from those before them in it.\n"
        "Against the first line, over positions: KL in nats, how often the most probable token is the same, "
        "and the largest difference of two logits."
    )
    table = Table(box=None, header_style="bold")
    table.add_column("", no_wrap=True)
    for title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for finding in measured.findings:
        name = variant_name(finding.variant)
        table.add_row(name, f"{finding.perplexity:.4f}", *_cells(finding.from_exact))
        if finding.from_bf16_reference is not None:
            table.add_row("  against the reference's bf16", "", *_cells(finding.from_bf16_reference))
    Console(width=max(Console().width, _WIDTH)).print(table)
    for left in measured.left_out:
        typer.echo(f"left out: {variant_name(left.variant)}: {left.reason}")


def _cells(found: Divergence | None) -> list[str]:
    if found is None:
        return ["exact"]
    return [
        *(f"{value:.2g}" for value in (found.kl_mean, found.kl_p99, found.kl_max)),
        f"{found.top1_agreement:.2%}",
        f"{found.largest_difference:.2g}",
    ]
