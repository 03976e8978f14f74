"""Cells: one run of one setting each. Kept by what decides them, so that an experiment that was interrupted
goes on, and a setting that was changed makes a new cell."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agentserve.sim.experiment.cause import Evidence
from agentserve.sim.experiment.fairness import Fairness
from agentserve.sim.experiment.metrics import Figures
from agentserve.sim.experiment.record import IterationRecord, RequestRecord, read_lines, write_lines

FORMAT = 2  # of what is kept; a new one makes all cells new


class Incomparable(ValueError):
    """Two runs differ in what makes figures comparable; one line."""


class Identity(msgspec.Struct, frozen=True):
    """What two runs must have in common to be compared."""

    model: str
    quantisation: str
    sampler: str
    graph_capture: str
    trace: str  # its title and digest


class Cell(msgspec.Struct, frozen=True):
    """What decides a run."""

    identity: Identity
    machine: str  # and all of its numbers
    entrant: str  # and all of its settings
    rate: float
    cap: int | None
    patience: float | None
    slo: str
    attempt: int = 0  # of the same: a real machine is not exact
    until_missed: float | None = (
        None  # the run ends when so many of all requests have missed; None: it goes on
    )

    @property
    def key(self) -> str:
        text = msgspec.json.encode((FORMAT, self), order="deterministic")
        return hashlib.sha256(text).hexdigest()[:20]


class CellResult(msgspec.Struct, frozen=True):
    """What a cell came to."""

    cell: Cell
    figures: Figures
    by_tenant: dict[str, Figures]
    by_kind: dict[str, Figures]
    fairness: Fairness
    evidence: Evidence
    longest_wait: float
    longest_overtaking: float
    late_entries: float  # of the bound on waiting
    iterations: int
    cut: bool  # it ended early, having missed enough: only its attainment says anything, as an upper bound


class CellStore:
    """A folder of cells and their raw logs. None as a folder: nothing is kept but in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._known: dict[str, CellResult] = {}

    def get(self, cell: Cell, *, logged: bool = False) -> CellResult | None:
        """The result of the same cell, if it is there (and, if `logged`, its raw logs are).
        A file that cannot be read counts as none."""
        found = self._known.get(cell.key)
        if found is not None or self.folder is None:
            return found
        if logged and not self.requests_path(cell).exists():
            return None
        try:
            found = msgspec.json.decode(self._path(cell).read_bytes(), type=CellResult)
        except (OSError, msgspec.MsgspecError):
            return None
        if found.cell != cell:
            return None
        self._known[cell.key] = found
        return found

    def put(
        self,
        result: CellResult,
        requests: list[RequestRecord] | None = None,
        iterations: list[IterationRecord] | None = None,
    ) -> None:
        """The logs first: a cell that is there has them."""
        self._known[result.cell.key] = result
        if self.folder is None:
            return
        if requests is not None:
            write_lines(requests, self.requests_path(result.cell))
        if iterations is not None:
            write_lines(iterations, self.iterations_path(result.cell))
        path = self._path(result.cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        beside.replace(path)

    def requests(self, cell: Cell) -> list[RequestRecord]:
        return read_lines(self.requests_path(cell), RequestRecord)

    def requests_path(self, cell: Cell) -> Path:
        assert self.folder is not None
        return self.folder / "logs" / f"{cell.key}.requests.jsonl"

    def iterations_path(self, cell: Cell) -> Path:
        assert self.folder is not None
        return self.folder / "logs" / f"{cell.key}.iterations.jsonl"

    def _path(self, cell: Cell) -> Path:
        assert self.folder is not None
        return self.folder / "cells" / f"{cell.key}.json"


def check_comparable(one: Identity, other: Identity, but: frozenset[str] = frozenset()) -> None:
    """but: names of fields that may differ. Raises Incomparable, naming what differs."""
    for name in Identity.__struct_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs and name not in but:
            raise Incomparable(
                f"these runs are not to be compared: {name.replace('_', ' ')} differs "
                f'("{mine[:80]}" and "{theirs[:80]}")'
            )


def digest_of(settings: msgspec.Struct | Mapping[str, object]) -> str:
    """Names settings by their content."""
    return hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()[:16]
