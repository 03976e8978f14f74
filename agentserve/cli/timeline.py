"""A session's history as bars in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

COLOURS = {
    "WAITING": "yellow",
    "PREFILLING": "magenta",
    "DECODING": "green",
    "PREEMPTED": "red",
    "WAITING_TOOL": "blue",
    "IDLE": "white",
    "FINISHED": "white",
}
WIDTH = 40  # columns; with the others a row fits into 80


def timeline(
    history: Sequence[Mapping[str, Any]], until: float, decisions: Sequence[Mapping[str, Any]] = ()
) -> Table:
    """One row per state the session was in: when it began, how long it lasted, where that lies. Between
    them what was decided about its KV, and why.

    history, decisions: of `GET /agentserve/sessions/{id}`, oldest first; `until`: Unix time of now.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("lasted", justify="right", no_wrap=True)
    table.add_column("0 s".ljust(WIDTH - 8) + f"{span(history, until):6.2f} s", no_wrap=True)
    left = [made for made in decisions if history and float(made["at"]) >= float(history[0]["at"])]
    for number, (step, lasted, bar) in enumerate(rows(history, until)):
        state = str(step["state"])
        colour = COLOURS.get(state, "white")
        began = float(step["at"]) - float(history[0]["at"])
        table.add_row(f"{began:.3f} s", Text(state, colour), f"{lasted:.3f} s", Text(bar, colour))
        end = float(history[number + 1]["at"]) if number + 1 < len(history) else math.inf
        while left and float(left[0]["at"]) < end:
            made = left.pop(0)
            at = float(made["at"]) - float(history[0]["at"])
            mark = marked(at / (span(history, until) or 1.0), str(made["reason"]))
            table.add_row(f"{at:.3f} s", Text(f"  {made['choice']}", "dim"), "", Text(mark, "dim"))
    return table


def marked(place: float, text: str) -> str:
    """A mark at `place` (0 to 1) of WIDTH columns, and a text on the side where there is more room."""
    column = min(WIDTH - 1, max(0, int(place * WIDTH)))
    if column < WIDTH // 2:
        return " " * column + f"▲ {text}"[: WIDTH - column]
    return f"{text[: column - 1]} ▲".rjust(column + 1)


def span(history: Sequence[Mapping[str, Any]], until: float) -> float:
    """Seconds from the first step to now."""
    return max(0.0, until - float(history[0]["at"])) if history else 0.0


def rows(history: Sequence[Mapping[str, Any]], until: float) -> list[tuple[Mapping[str, Any], float, str]]:
    """Each step, how long it lasted in seconds, and its bar on a scale of WIDTH columns."""
    whole = span(history, until) or 1.0
    found = []
    for number, step in enumerate(history):
        began = float(step["at"]) - float(history[0]["at"])
        end = (
            float(history[number + 1]["at"]) - float(history[0]["at"]) if number + 1 < len(history) else whole
        )
        left = min(WIDTH - 1, int(began / whole * WIDTH))
        width = max(1, round(max(0.0, end - began) / whole * WIDTH))
        found.append((step, max(0.0, end - began), " " * left + "█" * min(width, WIDTH - left)))
    return found
