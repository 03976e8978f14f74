"""What a campaign has done, and what came of it, as a line and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.prove.crash.points import POINTS


@dataclass
class Report:
    model: str = ""
    seed: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    random_kills: Counter[str] = field(default_factory=Counter)
    others: int = 0  # kills on the way to a point that a process passes while it starts
    server_starts: int = 0
    turns: int = 0
    ids: int = 0
    repeats: int = 0
    recovered: int = 0
    resumed: int = 0
    records: int = 0
    moved: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "seed": self.seed,
            "kills_at_named_points": sum(self.hits.values()),
            "hits_per_point": dict(sorted(self.hits.items())),
            "random_kills": dict(self.random_kills),
            "kills_on_the_way_to_a_start": self.others,
            "server_starts": self.server_starts,
            "turns_compared": self.turns,
            "ids_compared": self.ids,
            "requests_sent_again": self.repeats,
            "turns_found_committed_untold": self.recovered,
            "event_streams_taken_up_again": self.resumed,
            "records_read_in_dead_environments": self.records,
            "moved_in_the_last_life": dict(self.moved),
            "seconds": round(self.seconds, 1),
        }

    def line(self) -> str:
        return (
            f"{sum(self.hits.values())} kills at {len(self.hits)} points, "
            f"{sum(self.random_kills.values())} at random; "
            f"{self.turns} turns ({self.ids} ids) as undisturbed, "
            f"{self.repeats} requests sent again, {self.recovered} turns found on disk untold, "
            f"{self.resumed} event streams taken up again, {self.seconds:.0f} s"
        )


def summary(reports: Sequence[Report]) -> dict[str, Any]:
    """Several campaigns together, each point with how often it was hit."""
    hits: Counter[str] = Counter()
    for report in reports:
        hits += report.hits
    return {
        "kills_at_named_points": hits.total(),
        "random_kills": sum(report.random_kills.total() for report in reports),
        "hits_per_point": {point.name: hits[point.name] for point in POINTS},
        "campaigns": [report.plain() for report in reports],
    }
