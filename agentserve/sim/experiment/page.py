"""The report as one HTML file: tables and charts, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from agentserve.sim.experiment.cells import CellResult
from agentserve.sim.experiment.report import (
    CAUSE_COLUMNS,
    CLAIM_COLUMNS,
    COLUMNS,
    DEFINITIONS,
    TracesReport,
    cause_row,
    claim_row,
    markdown,
    row,
    title_of,
)
from agentserve.sim.experiment.study import TraceStudy
from agentserve.sim.shootout.plots import Points, chart

STYLE = (
    "body{font:14px/1.5 sans-serif;margin:2em auto;max-width:90em;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:.25em .6em;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}svg{width:31em;max-width:100%}"
    "figure{display:inline-block;margin:0 1em 1em 0}"
)

Value = Callable[[CellResult], float | None]

CURVES: tuple[tuple[str, Value, bool], ...] = (
    ("goodput (requests/s)", lambda result: result.figures.goodput, False),
    ("requests in SLO (%)", lambda result: 100 * result.figures.attainment, False),
    ("TTFT P99 (s)", lambda result: result.figures.ttft.p99 if result.figures.ttft else None, True),
    ("TBT P99 (ms)", lambda result: 1e3 * result.figures.tbt_p99 if result.figures.tbt_p99 else None, True),
    ("least share of a backlogged tenant (%)", lambda result: _percent(result.fairness.least_share), False),
)


def write_report(report: TracesReport, folder: Path) -> list[Path]:
    """Markdown and HTML into a folder; what is there of the same name is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, text in (("md", markdown(report)), ("html", html(report))):
        path = folder / f"{report.benchmark}.{suffix}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def html(report: TracesReport) -> str:
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{escape(report.stage)}</title><style>{STYLE}</style>',
        f"<h1>{escape(report.stage)}</h1>",
        f"<p>{escape(DEFINITIONS)}</p>",
        f"<p><code>{escape(report.command)}</code></p>",
    ]
    for study in report.studies:
        parts += [f"<h2>{escape(title_of(report, study))}</h2>", _table(COLUMNS, _rows(study))]
        parts += [f"<figure>{svg}</figure>" for svg in charts(report, study)]
    if report.causes:
        parts += ["<h2>What the knees are due to</h2>", _table(CAUSE_COLUMNS, map(cause_row, report.causes))]
    if report.claims:
        parts += ["<h2>What was asked</h2>", _table(CLAIM_COLUMNS, map(claim_row, report.claims))]
    parts += [f"<p>{escape(note)}</p>" for note in report.notes]
    return "\n".join([*parts, "</html>"]) + "\n"


def charts(report: TracesReport, study: TraceStudy) -> list[str]:
    """SVG documents: figures over the rate, and over the cap on concurrency where there was one."""
    title = f"{study.trace}, {report.stage}" + ("" if study.scale == 1.0 else f", lengths x {study.scale:g}")
    found = []
    for name, value, log in CURVES:
        rates = {
            stand.entrant.name: _points(stand.sweep, lambda result: result.cell.rate, value)
            for stand in study.stands
        }
        found.append(_chart(title, name, rates, "sessions per second", log=log))
        caps = {
            stand.entrant.name: _points(stand.capped, lambda result: float(result.cell.cap or 0), value)
            for stand in study.stands
        }
        found.append(_chart(title, name, caps, "requests at the server at once", log=log))
    return [svg for svg in found if svg]


def _chart(title: str, name: str, lines: Mapping[str, Points], x_title: str, *, log: bool) -> str:
    if not any(lines.values()):
        return ""
    return chart(title, name, lines, log_y=log, x_title=x_title, x_unit="")


def _points(results: Sequence[CellResult], x: Callable[[CellResult], float], y: Value) -> Points:
    """Of several runs of one setting: each is a point."""
    found = [(x(result), value) for result in results if (value := y(result)) is not None]
    return sorted(found)


def _rows(study: TraceStudy) -> list[list[str]]:
    return [row(stand, study) for stand in study.stands]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in each) + "</tr>" for each in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
