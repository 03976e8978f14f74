"""`agentserve records`: what a recording says, in a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from agentserve.cli.output import fail


def records(
    path: Annotated[Path, typer.Argument(help="A folder of `serve --recording`, or one of its files.")],
    tenant: Annotated[str | None, typer.Option(help="Requests of this one only.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
) -> None:
    """Sum up a recording: latencies of requests, what bound iterations, how well they were predicted."""
    from agentserve.bench.recorded import of_iterations, of_requests, report
    from agentserve.records.reader import read_records

    try:
        found = read_records(path)
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")
    if tenant is not None:
        found.requests = [request for request in found.requests if request.tenant == tenant]
        found.iterations = []  # they are all tenants'
    if not found.requests and not found.iterations:
        fail(f"{path}: nothing is recorded there" + (f" of tenant {tenant!r}" if tenant is not None else ""))
    if json:
        figures = {"requests": of_requests(found.requests), "iterations": of_iterations(found.iterations)}
        typer.echo(msgspec.json.format(msgspec.json.encode(figures)).decode())
    else:
        typer.echo(report(found))
