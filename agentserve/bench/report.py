"""What a benchmark found, as a value: rows for the terminal, JSON for `benchmarks/results/`."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from agentserve import __version__
from agentserve.machine import processor, usable_cores

VERSIONS_OF = ("torch", "numpy", "msgspec", "tokenizers", "xgrammar", "lmdb", "xxhash")


class Row(msgspec.Struct, frozen=True):
    """One figure. `limit` is what the machine or the design allows, in the same unit."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    limit_name: str = ""
    higher_is_better: bool = False
    runs: tuple[float, ...] = ()  # the single values that `value` is the median of
    group: str = ""  # of rows that belong together
    variant: str = ""  # of the model; rows of one name and several variants are to be compared
    asked: str = ""  # what it ought to come to

    @property
    def fraction(self) -> float | None:
        """How much of the limit is reached: 1 is all of it."""
        if not self.limit or not self.value:
            return None
        return self.value / self.limit if self.higher_is_better else self.limit / self.value


class Report(msgspec.Struct, frozen=True):
    benchmark: str
    command: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    skipped: Mapping[str, str] = {}  # what could not be measured here, and why


def machine() -> dict[str, str]:
    """What a reader must know of the machine to compare figures."""
    return {
        "processor": processor(),
        "cores": str(usable_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found = {"agentserve-llm": __version__}  # also of a checkout that is not installed
    for name in VERSIONS_OF:
        found[name] = version_of(name)
    return found


def version_of(distribution: str) -> str:
    """Of what is installed here."""
    return importlib.metadata.version(distribution)


class Benchmark(Protocol):
    """What can be written: a `Report`, or a struct of a benchmark whose findings are no rows."""

    @property
    def benchmark(self) -> str: ...


def writable(folder: Path) -> None:
    """Make a folder for results, before minutes of work for them. OSError if nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"0")


def write(report: Benchmark, folder: Path) -> Path:
    """Store a report as `<benchmark>.json`; an older one of that name is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.benchmark}.json"
    document = msgspec.to_builtins(report)
    if isinstance(report, Report):
        for entry, row in zip(document["rows"], report.rows, strict=True):
            entry["fraction"] = row.fraction
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    return path
