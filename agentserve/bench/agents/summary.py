"""What agents met with: the same figures for our engine and for any other server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table

from agentserve.messages import TiersView
from agentserve.sim.traces.draw import TraceSpec
from agentserve.sim.traces.record import percentile

SLO_TTFT, SLO_GAP = 2.0, 0.25  # seconds


class Turn(msgspec.Struct, frozen=True):
    """One turn as its client saw it; `gaps` are the seconds between tokens (or pieces of text)."""

    resumed: bool
    ttft: float
    seconds: float
    prompt: int
    cached: int
    generated: int
    gaps: tuple[float, ...] = ()

    @property
    def in_time(self) -> bool:
        return self.ttft <= SLO_TTFT and percentile(self.gaps, 0.99) <= SLO_GAP


class Summary(msgspec.Struct, frozen=True):
    """All turns of a run; times in seconds."""

    turns: int
    errors: int
    error: str  # the first of them
    seconds: float
    turns_per_second: float
    tokens_per_second: float
    first_ttft_p50: float
    first_ttft_p95: float
    resume_ttft_p50: float
    resume_ttft_p95: float
    resume_ttft_max: float
    resumes: int
    resumes_in_ttft: int  # with a first token within SLO_TTFT
    gap_p50: float
    gap_p99: float
    in_time: int  # turns whose TTFT and P99 gap are within both objectives
    prompt_tokens: int
    cached_tokens: int


class AgentsReport(msgspec.Struct, frozen=True):
    """One run as it is written down."""

    command: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    trace: TraceSpec
    summary: Summary
    tiers: TiersView | None = None  # what moved; None: there were none, or it is a peer's run
    benchmark: str = "agents"


def summarise(turns: Sequence[Turn], errors: Sequence[str], seconds: float) -> Summary:
    first = [turn.ttft for turn in turns if not turn.resumed]
    resumed = [turn.ttft for turn in turns if turn.resumed]
    gaps = [gap for turn in turns for gap in turn.gaps]
    span = seconds or 1.0
    return Summary(
        turns=len(turns),
        errors=len(errors),
        error=errors[0] if errors else "",
        seconds=seconds,
        turns_per_second=len(turns) / span,
        tokens_per_second=sum(turn.generated for turn in turns) / span,
        first_ttft_p50=percentile(first, 0.5),
        first_ttft_p95=percentile(first, 0.95),
        resume_ttft_p50=percentile(resumed, 0.5),
        resume_ttft_p95=percentile(resumed, 0.95),
        resume_ttft_max=max(resumed, default=0.0),
        resumes=len(resumed),
        resumes_in_ttft=sum(ttft <= SLO_TTFT for ttft in resumed),
        gap_p50=percentile(gaps, 0.5),
        gap_p99=percentile(gaps, 0.99),
        in_time=sum(turn.in_time for turn in turns),
        prompt_tokens=sum(turn.prompt for turn in turns),
        cached_tokens=sum(turn.cached for turn in turns),
    )


def table(summary: Summary) -> Table:
    found = Table(box=None, show_header=False)
    found.add_column()
    found.add_column(justify="right")
    rows = (
        ("turns, errors", f"{summary.turns}, {summary.errors}"),
        ("seconds", f"{summary.seconds:.1f}"),
        ("turns/s", f"{summary.turns_per_second:.3f}"),
        ("generated tokens/s", f"{summary.tokens_per_second:.1f}"),
        ("TTFT of first turns, P50 / P95", f"{summary.first_ttft_p50:.3f} / {summary.first_ttft_p95:.3f} s"),
        ("TTFT of resumes, P50 / P95", f"{summary.resume_ttft_p50:.3f} / {summary.resume_ttft_p95:.3f} s"),
        (f"resumes with TTFT ≤ {SLO_TTFT:g} s", f"{summary.resumes_in_ttft} of {summary.resumes}"),
        ("between tokens, P50 / P99", f"{summary.gap_p50:.3f} / {summary.gap_p99:.3f} s"),
        (f"turns in TTFT ≤ {SLO_TTFT:g} s and P99 gap ≤ {SLO_GAP:g} s", f"{summary.in_time}"),
        ("prompt tokens, of these cached", f"{summary.prompt_tokens:,}, {summary.cached_tokens:,}"),
    )
    for name, value in rows:
        found.add_row(name, value)
    return found
