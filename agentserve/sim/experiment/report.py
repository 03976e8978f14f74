"""What an experiment found, as a value: JSON, a Markdown table, and a comparison with another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from agentserve.sim.experiment.cause import Evidence
from agentserve.sim.experiment.cells import CellResult, Incomparable, check_comparable
from agentserve.sim.experiment.claims import Claim
from agentserve.sim.experiment.engines import SloRule
from agentserve.sim.experiment.metrics import Spread
from agentserve.sim.experiment.study import KneeCause, Plan, Stand, TraceStudy
from agentserve.sim.hardware import Hardware

COLUMNS = (
    *("policy", "step", "knee (sessions/s)", "best goodput (requests/s)", "rate", "in SLO"),
    *(
        "by gaps",
        "by deadlines",
        "TTFT P50 / P95 / P99 (s)",
        "TPOT P50 (ms)",
        "TBT P99 (ms)",
        "tokens/s",
        "OOM",
        "rejected",
    ),
    *("Jain", "largest gap", "least share", "prefix hits", "preempted"),
)
SHOWN = (  # where there is little room
    *("policy", "knee (sessions/s)", "best goodput (requests/s)", "rate", "by gaps", "by deadlines"),
    *("TTFT P50 / P95 / P99 (s)", "TBT P99 (ms)", "tokens/s", "least share", "prefix hits"),
)
CAUSE_COLUMNS = (
    *("trace", "policy", "a quarter beyond the knee", "said", "evidence", "a quarter more of", "confirmed"),
)
CLAIM_COLUMNS = ("trace", "asked", "found", "holds")
DEFINITIONS = (
    "TTFT counts from when a request was meant to arrive. TBT P99 is over all gaps between tokens. In SLO: "
    "the first token was in time, and the others too, in the form that was promised: the 99th percentile of "
    "the request's own gaps, or every token by arrival + TTFT + number x TBT; of all requests after the "
    "warm-up (a tenth of the sessions), rejected and aborted ones among them. Goodput: those in SLO per "
    "second, from the first arrival to the last end. Knee: the highest rate with at least 90 % in SLO, to "
    "2.5 %. Jain's index, the largest gap (thousand weighted tokens of work) and the least share (of what a "
    "tenant's weight entitles it to, in backlogs in which that is ten of the largest requests) are of the "
    "run at the rate of the row."
)


class TracesReport(msgspec.Struct, frozen=True):
    """The whole of one experiment."""

    benchmark: str
    command: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    stage: str  # what the figures are of: stands beside each
    hardware: Hardware  # what promises, and simulated times, come from
    slo: SloRule
    plan: Plan
    studies: Sequence[TraceStudy]
    causes: Sequence[KneeCause] = ()
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()


def load_report(path: Path) -> TracesReport:
    """Raises Incomparable if it is no report of an experiment, or OSError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TracesReport)
    except msgspec.MsgspecError as error:
        raise Incomparable(f"{path.name}: no report of traces: {error}") from error


def markdown(report: TracesReport) -> str:
    """Tables: for each trace all policies at the rate of the best knee, and what bound there."""
    parts = [f"# {report.stage}", "", DEFINITIONS, ""]
    for study in report.studies:
        parts += [
            f"## {title_of(report, study)}",
            "",
            *_table(COLUMNS, (row(stand, study) for stand in study.stands)),
            "",
        ]
    if report.causes:
        parts += [
            "## What the knees are due to",
            "",
            *_table(CAUSE_COLUMNS, map(cause_row, report.causes)),
            "",
        ]
    if report.claims:
        parts += ["## What was asked", "", *_table(CLAIM_COLUMNS, map(claim_row, report.claims)), ""]
    parts += [f"- {note}" for note in report.notes]
    return "\n".join(parts).rstrip() + "\n"


def title_of(report: TracesReport, study: TraceStudy) -> str:
    """Every figure stands under it: where it was found, and how far lengths were scaled."""
    scale = "full size" if study.scale == 1.0 else f"all lengths x {study.scale:g}"
    return f"{study.trace}, {scale} ({report.stage}; {study.sessions} sessions, {study.requests} requests)"


def shown_cell(stand: Stand, study: TraceStudy) -> CellResult | None:
    """The one that a row shows: of the rate at which anybody's goodput was best. None: nothing was swept."""
    best = max(
        (result for each in study.stands for result in each.sweep),
        key=lambda result: result.figures.goodput,
        default=None,
    )
    if best is None:
        return None
    return next((result for result in stand.sweep if result.cell.rate == best.cell.rate), None)


def row(stand: Stand, study: TraceStudy) -> list[str]:
    """In the order of COLUMNS."""
    result = shown_cell(stand, study)
    step = "" if stand.entrant.tokens is None else str(stand.entrant.tokens)
    knee = "" if stand.knee is None else f"{stand.knee.rate:.3g}"
    cells = [stand.entrant.name, step, knee, f"{stand.goodput:.3g}"]
    if result is None:
        return cells + [""] * (len(COLUMNS) - len(cells))
    found, fair = result.figures, result.fairness
    return [
        *cells,
        f"{result.cell.rate:.3g}",
        f"{found.attainment:.1%}",
        f"{found.attainment_by_gaps:.1%}",
        f"{found.attainment_by_deadlines:.1%}",
        _spread(found.ttft),
        "" if found.tpot is None else f"{found.tpot.p50 * 1e3:.1f}",
        "" if found.tbt_p99 is None else f"{found.tbt_p99 * 1e3:.0f}",
        f"{found.tokens_per_second:.1f}",
        f"{found.oom_rate:.1%}",
        f"{found.rejection_rate:.1%}",
        "" if fair.jain is None else f"{fair.jain:.3f}",
        "" if fair.largest_gap is None else f"{fair.largest_gap / 1e3:.1f}",
        "" if fair.least_share is None else f"{fair.least_share:.0%}",
        f"{found.hit_rate:.0%}",
        str(found.preemptions),
    ]


def against(report: TracesReport, other: TracesReport) -> list[list[str]]:
    """This one over another: rows of (trace, policy, knees, best goodputs, ratio). Raises Incomparable if two
    runs of one trace and policy differ in model, quantisation, sampler, graph capture or trace, or if there
    is nothing to compare."""
    rows = []
    theirs = {(study.trace, stand.entrant.name): stand for study in other.studies for stand in study.stands}
    for study in report.studies:
        for stand in study.stands:
            beside = theirs.get((study.trace, stand.entrant.name))
            if beside is None:
                continue
            for mine, older in zip(stand.sweep, beside.sweep, strict=False):
                check_comparable(mine.cell.identity, older.cell.identity)
            rows.append([study.trace, stand.entrant.name, *_ratios(stand, beside)])
    if not rows:
        raise Incomparable("these reports have no trace and policy in common")
    return rows


def _ratios(stand: Stand, beside: Stand) -> list[str]:
    mine, theirs = stand.goodput, beside.goodput
    knees = ["" if each.knee is None else f"{each.knee.rate:.3g}" for each in (stand, beside)]
    return [*knees, f"{mine:.3g}", f"{theirs:.3g}", f"{mine / theirs:.3f}" if theirs else ""]


def cause_row(each: KneeCause) -> list[str]:
    """In the order of CAUSE_COLUMNS."""
    moved = ", ".join(f"{one.more_of} {one.moved:+.0%}" for one in each.interventions)
    confirmed = "yes" if each.confirmed else "no"
    return [each.trace, each.entrant, f"{each.rate:.3g}", each.said, told(each.at.evidence), moved, confirmed]


def claim_row(claim: Claim) -> list[str]:
    """In the order of CLAIM_COLUMNS."""
    return [claim.trace, claim.asked, claim.found, "yes" if claim.holds else "no"]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def told(found: Evidence) -> str:
    links = ", ".join(f"{link} link {share:.0%}" for link, share in found.link_busy.items())
    return (
        f"device busy {found.device_busy:.0%}; bound by tokens or time {found.bound_by_work:.0%}; "
        f"lacked pages {found.lacked_pages:.0%}; held by copies {found.held_by_copies:.0%}; "
        f"host {found.host:.0%}" + (f"; {links}" if links else "")
    )


def _spread(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.p50:.3g} / {spread.p95:.3g} / {spread.p99:.3g}"
