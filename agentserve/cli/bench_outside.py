"""`agentserve bench outside`: agents' sessions replayed by load generators of others, and their checks."""

from __future__ import annotations

import shlex
import sys
import tempfile
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentserve.cli.bench_frontend import show
from agentserve.cli.local_server import NoServer, local_server
from agentserve.cli.output import fail

if TYPE_CHECKING:
    from agentserve.bench.report import Row


class ToolName(StrEnum):
    ABENCH = "abench"
    AIPERF = "aiperf"
    GIRAFFE = "giraffe"


def outside(
    *,
    tool: Annotated[ToolName, typer.Option(help="Who replays or, with giraffe, checks.")] = ToolName.ABENCH,
    tools_dir: Annotated[
        Path, typer.Option(help="Holds an environment of the tool's name; `make outside` makes it.")
    ] = Path(".venv-outside"),
    model: Annotated[str, typer.Option(help="What to serve.")] = "smollm2-135m",
    url: Annotated[
        str | None,
        typer.Option(help="Use this server, which has --model.", show_default="starts one of its own"),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder that transformers loads.", show_default="the model's")
    ] = None,
    agents: Annotated[int, typer.Option(min=1, help="Sessions.")] = 6,
    lanes: Annotated[int, typer.Option(min=1, help="So many at once.")] = 4,
    turns: Annotated[int, typer.Option(min=2, help="Of each session.")] = 6,
    output: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    wait: Annotated[float, typer.Option(min=0, help="Mean seconds that a tool takes.")] = 0.8,
    seconds: Annotated[float, typer.Option(min=5, help="Of each of aiperf's replays.")] = 15.0,
    seed: Annotated[int, typer.Option()] = 1,
    served_name: Annotated[
        str | None,
        typer.Option(help="giraffe: what servers call --model.", show_default="the same"),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(help="giraffe: NAME=URL of another server with this model; check it instead of ours."),
    ] = None,
    results: Annotated[Path | None, typer.Option(help="Write outside-TOOL.json into this folder.")] = None,
) -> None:
    """Replay agents' sessions with tool waits, streamed and whole; status 1 if any request fails.

    Half a minute with abench, two with aiperf (which does so through three of the server's APIs). giraffe
    checks answers instead, in two minutes; its status is 1 if a check fails for another reason than them.
    """
    if tool is ToolName.GIRAFFE:
        from agentserve.cli.bench_giraffe import checks

        name = served_name or model
        if "/" in name:
            fail(f"{name} is no name for a result; give --served-name")
        checks(tools_dir / tool.value, model, name, url=url, peer=peer, results=results)
        return
    from agentserve.bench import report
    from agentserve.bench.outside.run import Place, failed, replay_all, tools
    from agentserve.bench.outside.tokenizer import tokenizer_folder
    from agentserve.bench.outside.tools import Load, ToolFailed

    load = Load(model, agents, min(lanes, agents), turns, output, wait, seconds, seed)
    made = tools()[tool.value]()
    progress = Console(stderr=True, highlight=False)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        try:
            if tokenizer is None:
                tokenizer = tokenizer_folder(model, folder / "tokenizer")
            if url is None:
                url = stack.enter_context(local_server(["--model", model]))
            place = Place(tools_dir / tool.value, url.rstrip("/"), tokenizer, folder)
            rows, version = replay_all(made, load, place, progress.print)
        except (NoServer, ToolFailed, OSError, ValueError) as error:
            fail(str(error))
    show(rows, Console())
    if results is not None:
        document = report.Report(
            f"outside-{tool.value}",
            shlex.join(["agentserve", *sys.argv[1:]]),
            report.machine(),
            report.versions() | {made.distribution: version},
            rows,
        )
        typer.echo(f"written to {report.write(document, results)}")
    if failed(rows):
        fail("requests failed")
