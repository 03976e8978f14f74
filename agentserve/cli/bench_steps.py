"""`agentserve bench steps`: how well step times are predicted on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentserve.cli.bench_table import show_rows
from agentserve.cli.output import fail
from agentserve.config import load
from agentserve.machine import usable_cores

if TYPE_CHECKING:
    from agentserve.bench.steps.run import Findings


def steps_bench(
    *,
    steps: Annotated[int, typer.Option(min=500, help="Of each of two loads.")] = 1500,
    seed: Annotated[int, typer.Option(min=0, help="Of both loads.")] = 0,
    model: Annotated[str | None, typer.Option(show_default="smollm2-135m")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="bf16")] = None,
    weights: Annotated[str | None, typer.Option(help="expanded or stored.", show_default="stored")] = None,
    activations: Annotated[
        str | None, typer.Option(help="float, or int8 for stored weights.", show_default="float")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto, bf16, fp16, fp32 or int8.", show_default="auto")
    ] = None,
    device: Annotated[str | None, typer.Option(show_default="cpu")] = None,
    device_kv: Annotated[str, typer.Option(help="KV pool.")] = "1GiB",
    max_batched_tokens: Annotated[str | None, typer.Option(show_default="512")] = None,
    threads: Annotated[str | None, typer.Option(show_default="all cores")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the fitted model here, for --step-model.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep what was recorded in this folder.")] = None,
    results: Annotated[Path | None, typer.Option(help="Write steps.json into this folder.")] = None,
) -> None:
    """Drive a mixed random load, fit the cost model to it, and predict the steps of another load.

    Some minutes; the machine should be quiet.
    """
    from agentserve.server.workers.supervisor import worker_environment

    # As in `agentserve bench`: kernel threads must wait as a worker's do, so before torch is loaded.
    os.environ.update(worker_environment())
    from agentserve.bench import report
    from agentserve.bench.steps import run
    from agentserve.core.timing.saved import encode_saved
    from agentserve.server.workers.build import build_engine
    from agentserve.server.workers.spec import worker_spec

    flags = {
        "model": model, "dtype": dtype, "weights": weights, "activations": activations, "kv_dtype": kv_dtype,
        "device": device, "device_kv": device_kv, "max_batched_tokens": max_batched_tokens,
        "threads": threads,
    }  # fmt: skip
    settings = load(flags, None)
    progress = Console(stderr=True)

    def measure(folder: Path) -> Findings:
        built = build_engine(worker_spec(settings, 0, "", os.getpid(), usable_cores()))
        return run.measure(built, steps, folder, seed, lambda stage: progress.print(f"{stage} ..."))

    try:
        found = _in_folder(logs, measure)
        if output is not None:
            output.write_bytes(encode_saved(found.saved))
    except (ValueError, OSError) as error:
        fail(str(error))
    show_rows(found.rows, found.notes)
    if output is not None:
        typer.echo(f"the cost model is in {output}")
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        document = report.Report(
            "steps", command, report.machine(), report.versions(), found.rows, found.notes
        )
        typer.echo(f"written to {report.write(document, results)}")


def _in_folder(folder: Path | None, measure: Callable[[Path], Findings]) -> Findings:
    if folder is not None:
        return measure(folder)
    with tempfile.TemporaryDirectory(prefix="bench-steps-") as mine:
        return measure(Path(mine))
