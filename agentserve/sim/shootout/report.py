"""What a shoot-out found, as values, tables and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from agentserve.sim.hardware import Hardware
from agentserve.sim.shootout.contest import Setting, Standing
from agentserve.sim.shootout.plots import Points, chart

MOVES = {"save": "saved", "load": "loaded", "write": "written", "fetch": "fetched"}
COLUMNS = (
    "policy",
    "turns/s",
    "of oracle",
    "least/LRU",
    "resume P50",
    "P95",
    "again",
    *MOVES.values(),
    "wedged",
)


class ShootOut(msgspec.Struct, frozen=True):
    """The whole of one shoot-out; `benchmarks/results/policies.json` is one."""

    command: str
    versions: Mapping[str, str]
    seeds: Sequence[int]
    seconds: Mapping[str, float]  # virtual, per hardware
    tuned: int  # parameter sets that each policy was given in the sweep; 0: published defaults
    hardware: Sequence[Hardware]
    standings: Sequence[Standing]
    benchmark: str = "policies"

    @property
    def wedged(self) -> list[str]:
        return [
            f"{standing.policy}, {standing.setting}: {why}"
            for standing in self.standings
            for why in standing.wedged
        ]


def tables(standings: Sequence[Standing]) -> list[Table]:
    """One table per setting."""
    return [
        table(setting, [standing for standing in standings if standing.setting == setting])
        for setting in dict.fromkeys(standing.setting for standing in standings)
    ]


def table(setting: Setting, standings: Sequence[Standing]) -> Table:
    measured = standings[0].oversubscribed
    found = Table(title=f"{setting} (measured: {measured:.1f}×)", box=None, header_style="bold")
    for column in COLUMNS:
        found.add_column(column, justify="left" if column == "policy" else "right")
    for standing in standings:
        found.add_row(*cells(standing))
    return found


def cells(standing: Standing) -> list[str]:
    """A row, in the order of COLUMNS. "again": tokens computed a second time, of those computed."""
    computed = sum(outcome.computed for outcome in standing.outcomes) / len(standing.outcomes)
    return [
        standing.policy,
        f"{standing.turns_per_second:.3f}",
        _percent(standing.of_oracle),
        _percent(standing.least_of_lru),
        f"{standing.resume_ttft_p50:.3f} s",
        f"{standing.resume_ttft_p95:.3f} s",
        f"{standing.recomputed / computed:.0%}" if computed else "",
        *(_size(standing.moved.get(move, 0.0)) for move in MOVES),
        str(len(standing.wedged)) if standing.wedged else "",
    ]


def charts(standings: Sequence[Standing]) -> dict[str, str]:
    """SVG documents by file name: per machine and kind of hints, over oversubscription."""
    found = {}
    kinds = dict.fromkeys(
        (each.setting.hardware, each.setting.hints, each.setting.events) for each in standings
    )
    for hardware, hints, events in kinds:
        own = [
            each
            for each in standings
            if (each.setting.hardware, each.setting.hints, each.setting.events) == (hardware, hints, events)
        ]
        name = f"{hardware}-{hints.value}{'-events' if events else ''}"
        title = f"{hardware}, hints {hints.value}{', tool events' if events else ''}"
        share = _lines(own, [(each.of_oracle or 0.0) for each in own])
        rate = _lines(own, [each.turns_per_second for each in own])
        late = _lines(own, [each.resume_ttft_p95 for each in own])
        again = _lines(own, [each.recomputed / 1000 for each in own])
        if any(each.of_oracle is not None for each in own):
            found[f"{name}-oracle.svg"] = chart(title, "turns/s over the oracle's", share)
        found[f"{name}-turns.svg"] = chart(title, "completed turns/s", rate)
        found[f"{name}-resume.svg"] = chart(title, "resume TTFT P95 (s)", late, log_y=True)
        found[f"{name}-again.svg"] = chart(title, "tokens computed again (thousands)", again)
    return found


def write_charts(standings: Sequence[Standing], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, svg in charts(standings).items():
        path = folder / name
        path.write_text(svg, encoding="utf-8")
        paths.append(path)
    return paths


def _lines(standings: Sequence[Standing], values: Sequence[float]) -> dict[str, Points]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for standing, value in zip(standings, values, strict=True):
        lines.setdefault(standing.policy, []).append((standing.setting.oversubscription, value))
    return {name: sorted(points) for name, points in lines.items()}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _size(size: float) -> str:
    if not size:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
