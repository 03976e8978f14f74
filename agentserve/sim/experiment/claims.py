"""What is asked of ours, beside what an experiment found. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentserve.core.scheduling.relegation import EVERY
from agentserve.sim.experiment.engines import OURS, OURS_ALONE
from agentserve.sim.experiment.study import Stand, TraceStudy

LEAST_SHARE = 0.9  # of what a tenant is entitled to while it is backlogged
TIMES = 1.5  # chunked prefill's goodput, on the agents' trace
CHUNKED, AGENTS = "chunked", "agents"
OVERLOAD = 1.2  # times the best knee: above it queues grow for as long as sessions come


class Claim(msgspec.Struct, frozen=True):
    trace: str
    asked: str
    found: str
    holds: bool


def claims(studies: Sequence[TraceStudy]) -> list[Claim]:
    """Of each trace that ours ran on; nothing of others."""
    made = []
    for study in studies:
        stands = {stand.entrant.name: stand for stand in study.stands}
        for name in (OURS, OURS_ALONE):
            if name in stands:
                made += [_goodput(study, stands[name]), *_overload(study, stands[name])]
        if study.trace == AGENTS and OURS in stands and CHUNKED in stands:
            made.append(_times(study, stands[OURS], stands[CHUNKED]))
    return made


def _goodput(study: TraceStudy, ours: Stand) -> Claim:
    """Beside those that have what it has: with tiers beside everybody, without beside who has none."""
    others = [
        stand
        for stand in study.stands
        if stand is not ours and (ours.entrant.tiers or not stand.entrant.tiers)
    ]
    best = max(others, key=lambda stand: stand.goodput, default=ours)
    found = f"{ours.goodput:.3g} requests/s; next {best.entrant.name} with {best.goodput:.3g}"
    return Claim(
        study.trace, f"{ours.entrant.name}: the highest goodput", found, ours.goodput >= best.goodput
    )


def _times(study: TraceStudy, ours: Stand, chunked: Stand) -> Claim:
    ratio = ours.goodput / chunked.goodput if chunked.goodput else float("inf")
    return Claim(study.trace, f"{OURS}: {TIMES:g} x chunked's goodput", f"{ratio:.2f} x", ratio >= TIMES)


def _overload(study: TraceStudy, ours: Stand) -> list[Claim]:
    """Of runs beyond the best knee."""
    best = max((stand.knee.rate for stand in study.stands if stand.knee is not None), default=0.0)
    runs = [result for result in ours.sweep if best and result.cell.rate >= OVERLOAD * best]
    shares = [run.fairness.least_share for run in runs if run.fairness.least_share is not None]
    made = []
    name = ours.entrant.name
    if shares:
        asked = f"{name}: no tenant below {LEAST_SHARE:.0%} of its weighted share while backlogged"
        made.append(Claim(study.trace, asked, f"{min(shares):.0%}", min(shares) >= LEAST_SHARE))
    if runs:
        most = max(run.late_entries for run in runs)
        asked = (
            f"{name}: a late turn enters before {EVERY} x (turns of its tenant in line by then + 1) "
            "others have"
        )
        waited = max(run.longest_wait for run in runs)
        found = f"{most:.0%} of that at most; the longest wait was {waited:.1f} s"
        made.append(Claim(study.trace, asked, found, most <= 1))
    return made
