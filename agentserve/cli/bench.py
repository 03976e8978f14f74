"""`agentserve bench`: what a step costs outside the model, and how fast the model runs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli.bench_agents import agents
from agentserve.cli.bench_compare import compare
from agentserve.cli.bench_frontend import frontend
from agentserve.cli.bench_grammar import grammar
from agentserve.cli.bench_kernels import bench_kernels
from agentserve.cli.bench_outside import outside
from agentserve.cli.bench_overlap import overlap as overlap_bench
from agentserve.cli.bench_quality import quality_bench
from agentserve.cli.bench_scheduler import scheduler
from agentserve.cli.bench_steps import steps_bench
from agentserve.cli.bench_tiers import tiers_bench
from agentserve.cli.bench_traces import traces
from agentserve.cli.output import fail
from agentserve.config import load
from agentserve.machine import usable_cores

if TYPE_CHECKING:
    from agentserve.bench.report import Row


bench = typer.Typer(
    help="Measure this machine: engine overhead, decode and prefill, beside the limits. Some minutes.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
bench.command("agents")(agents)
bench.command("compare")(compare)
bench.command("frontend")(frontend)
bench.command("grammar")(grammar)
bench.command("kernels")(bench_kernels)
bench.command("outside")(outside)
bench.command("overlap")(overlap_bench)
bench.command("quality")(quality_bench)
bench.command("steps")(steps_bench)
bench.command("scheduler")(scheduler)
bench.command("tiers")(tiers_bench)
bench.command("traces")(traces)


@bench.callback()
def speed_bench(
    context: typer.Context,
    *,
    model: Annotated[str | None, typer.Option(show_default="smollm2-135m")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="bf16")] = None,
    weights: Annotated[str, typer.Option(help="expanded or stored.")] = "expanded",
    activations: Annotated[
        str | None, typer.Option(help="float, or int8 for stored weights.", show_default="float")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto, bf16, fp16, fp32 or int8.", show_default="auto")
    ] = None,
    device: Annotated[str | None, typer.Option(show_default="cpu")] = None,
    device_kv: Annotated[str, typer.Option(help="KV pool.")] = "1GiB",
    threads: Annotated[str | None, typer.Option(show_default="all cores")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs per figure; the median counts.")] = 3,
    overhead: Annotated[bool, typer.Option(help="Also measure the engine without a model.")] = True,
    results: Annotated[Path | None, typer.Option(help="Write JSON into this folder.")] = None,
) -> None:
    """Measure this machine: engine overhead, decode and prefill, beside the limits. Takes some minutes."""
    if context.invoked_subcommand is not None:
        return
    from agentserve.server.workers.supervisor import worker_environment

    # The model runs in this process: its kernel threads must wait as a worker's do. Read by libgomp
    # when torch loads it, so before that import.
    os.environ.update(worker_environment())
    from agentserve.bench import overhead as overheads
    from agentserve.bench import report, speed
    from agentserve.server.workers.build import build_engine
    from agentserve.server.workers.spec import worker_spec

    flags = {
        "model": model, "dtype": dtype, "weights": weights, "activations": activations, "kv_dtype": kv_dtype,
        "device": device, "device_kv": device_kv, "threads": threads,
    }  # fmt: skip
    settings = load(flags, None)
    spec = worker_spec(settings, 0, "", os.getpid(), usable_cores())
    try:
        rows = overheads.measure() if overhead else []
        built = build_engine(spec)
        rows += speed.measure(built, runs)
    except (ValueError, OSError) as error:
        fail(str(error))
    notes = [speed.kept(built.hello)]
    show(rows, notes)
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        found = report.Report("speed", command, report.machine(), report.versions(), rows, notes)
        typer.echo(f"written to {report.write(found, results)}")


def show(rows: Sequence[Row], notes: Sequence[str]) -> None:
    table = Table(box=None, header_style="bold")
    for title, side in (("", "left"), ("median", "right"), ("limit", "right"), ("of limit", "right")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for row in rows:
        limit = f"{row.limit:,.4g} ({row.limit_name})" if row.limit else ""
        fraction = f"{row.fraction:.0%}" if row.fraction else ""
        table.add_row(row.name, f"{row.value:,.4g} {row.unit}", limit, fraction)
    Console().print(table)
    for note in notes:
        typer.echo(note)
