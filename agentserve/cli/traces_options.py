"""What `sim traces` and `bench traces` share: reading what is asked for, showing progress, reports."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentserve.cli.output import fail

if TYPE_CHECKING:
    from agentserve.sim.experiment.cells import CellResult
    from agentserve.sim.experiment.report import TracesReport
    from agentserve.sim.experiment.script import Trace

WIDTH = 160  # of tables that no terminal bounds


class Pace(StrEnum):
    """`sim.experiment.record.Pace`, which need not be loaded for `--help`."""

    GAPS = "gaps"
    DEADLINES = "deadlines"


def names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def numbers(given: str, option: str) -> tuple[float, ...]:
    """Raises ValueError, one line, unless all are above 0."""
    try:
        found = tuple(float(name) for name in names(given))
    except ValueError:
        found = (-1.0,)
    if not all(0 < number < float("inf") for number in found):
        raise ValueError(f"{option}: expected numbers above 0 with commas between, got {given[:64]!r}")
    return found


def tenants(given: str) -> dict[str, float]:
    """`blue=1,red=2`. Raises ValueError, one line."""
    found = {}
    for part in names(given):
        name, _, weight = part.partition("=")
        found[name] = numbers(weight or "1", f"--tenants: {name}")[0]
    if not found:
        raise ValueError("--tenants: at least one")
    return found


def traces(
    only: str,
    files: Sequence[Path],
    *,
    sessions: int | None,
    weights: Mapping[str, float],
    seed: int,
    scale: float,
) -> list[Trace]:
    """Drawn ones by name and recorded ones by file. Raises TraceError or OSError."""
    from agentserve.sim.experiment.loaders import load
    from agentserve.sim.experiment.script import TraceError
    from agentserve.sim.experiment.synthetic import SESSIONS, draw

    found = [
        draw(name, sessions or SESSIONS.get(name, 1), seed=seed, scale=scale, tenants=weights)
        for name in names(only)
    ]
    for path in files:
        trace = load(path, scale=scale, weights=weights)
        if sessions is not None:
            trace = msgspec.structs.replace(trace, sessions=trace.sessions[:sessions])
        found.append(trace)
    if not found:
        raise TraceError("no trace: give --only or --trace")
    return found


class Bar:
    """Cells as they end. On no terminal, a line each."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("cells", total=None)
        self._done = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def said(self, what: str, result: CellResult) -> None:
        self._done += 1
        figures = result.figures
        cap = "" if result.cell.cap is None else f", cap {result.cell.cap}"
        line = (
            f"{what}: {result.cell.rate:.4g}/s{cap}, "
            f"in SLO {'at most ' if result.cut else ''}{figures.attainment:.1%}"
        )
        self._progress.update(self._task, completed=self._done, description=line)
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)


def finish(report: TracesReport, results: Path | None, other: Path | None) -> None:
    """Show the tables; write JSON, Markdown and HTML; compare with an earlier report."""
    from agentserve.bench import report as benchmark
    from agentserve.sim.experiment.cells import Incomparable
    from agentserve.sim.experiment.page import write_report
    from agentserve.sim.experiment.report import (
        CLAIM_COLUMNS,
        COLUMNS,
        SHOWN,
        against,
        claim_row,
        load_report,
        row,
        title_of,
    )

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    for study in report.studies:
        kept = [COLUMNS.index(column) for column in SHOWN]
        rows = [[row(stand, study)[at] for at in kept] for stand in study.stands]
        console.print(_table(title_of(report, study), SHOWN, rows))
    if report.claims:
        console.print(_table("what was asked", CLAIM_COLUMNS, [claim_row(claim) for claim in report.claims]))
    for note in report.notes:
        console.print(note, highlight=False)
    if results is not None:
        paths = [benchmark.write(report, results), *write_report(report, results)]
        typer.echo(f"written to {', '.join(str(path) for path in paths)}")
    if other is not None:
        try:
            rows = against(report, load_report(other))
        except (Incomparable, OSError) as error:
            fail(str(error))
        columns = ("trace", "policy", "knee", "theirs", "best goodput", "theirs", "ratio")
        console.print(_table(f"beside {other.name}", columns, rows))


def command_line() -> str:
    """As it was typed, but for where files lie."""
    words = []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        last = value if equals else word
        short = Path(last).name if "/" in last else last
        words.append(f"{option}={short}" if equals else short)
    return shlex.join(["agentserve", *words])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    found = Table(title=title, box=None, header_style="bold")
    for number, column in enumerate(columns):
        found.add_column(column, justify="left" if not number else "right")
    for cells in rows:
        found.add_row(*cells)
    return found
