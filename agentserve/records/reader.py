"""Reading recordings. A line that was torn or damaged costs itself and is counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agentserve.records.lines import Gap, IterationRecord, Line, Opened, RequestRecord, decode_line

_FILE = re.compile(r"(requests|iterations\.w\d+)(?:\.(\d+))?\.jsonl")


@dataclass(slots=True)
class Records:
    """All that was read."""

    opened: list[Opened] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    iterations: list[IterationRecord] = field(default_factory=list)
    missing: int = 0  # lines that were never written
    damaged: int = 0  # lines that could not be read


def read_records(path: Path) -> Records:
    """Of one file, or of a folder that a server records into. OSError."""
    found = Records()
    for line in each_line(path):
        match line:
            case RequestRecord():
                found.requests.append(line)
            case IterationRecord():
                found.iterations.append(line)
            case Opened():
                found.opened.append(line)
            case Gap(lines=lines):
                found.missing += lines
            case None:
                found.damaged += 1
    return found


def each_line(path: Path) -> Iterator[Line | None]:
    """In the order in which they were written, series by series; None for each that cannot be read."""
    for file in series_files(path) if path.is_dir() else [path]:
        with open(file, "rb") as lines:
            for line in lines:
                if line != b"\n":
                    yield _decoded(line)


def series_files(folder: Path) -> list[Path]:
    """Files of a recording, each series from its oldest file on."""
    found = [(match, file) for file in folder.iterdir() if (match := _FILE.fullmatch(file.name))]
    found.sort(key=lambda pair: (pair[0][1], -int(pair[0][2] or 0)))
    return [file for _, file in found]


def _decoded(line: bytes) -> Line | None:
    try:
        return decode_line(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
