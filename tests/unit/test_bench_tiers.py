"""`agentserve bench tiers` on small blocks: its rows, its file, and how it says what is wrong."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from agentserve.bench import report
from agentserve.bench.tiers import cold, moves, run
from agentserve.bench.tiers.findings import Limit, rate_row, time_row
from agentserve.bench.tiers.scene import Scene
from agentserve.cli.main import app
from agentserve.clock import WallClock
from tiering.stores.mover import Mover
from tiering.types import Move

SMALL = ["--only", "moves", "--block", "20000", "--blocks", "12", "--runs", "2"]


@pytest.fixture(autouse=True)
def no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "versions", dict)  # the distribution need not be installed here


def test_every_way_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    found = run.measure(tmp_path, moves.Sizes(20_000, 12, 2), None, lambda stage: None)
    names = [row.name for row in found.rows]
    ways = ("memcpy", "save", "save into", "load", "write", "fetch, warm", "LMDB alone, cold", "fetch, cold")
    assert all(name.startswith(way) for name, way in zip(names, ways, strict=False))
    assert len(names) == len(ways) - 2 * len(found.skipped)
    assert all(row.value > 0 and row.unit == "GB/s" for row in found.rows)
    assert [len(row.runs) for row in found.rows[:6]] == [2, 2, 1, 2, 2, 2]
    assert list(tmp_path.iterdir()) == []


def test_what_stays_in_memory_is_not_called_cold(tmp_path: Path) -> None:
    """A page that another process maps, or a file system that lives in memory: asked, not assumed."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert cold.pages_in_memory(path) in {(1 << 20) // mmap.PAGESIZE, None}
    assert cold.still_in_memory(path) != ""
    empty = tmp_path / "empty"
    empty.touch()
    assert cold.pages_in_memory(empty) == 0


def test_looking_at_a_cold_file_does_not_warm_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 << 20))
    if why_not := cold.drop_from_memory(path):
        pytest.skip(why_not)
    for _ in range(3):
        assert cold.pages_in_memory(path) == 0
    with path.open("rb") as file:
        file.read(1)
    assert cold.pages_in_memory(path) != 0


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (100, 1_000_100, ""),
        (100, 900_200, ""),
        (100, 800_100, "only 1 of 1 MB came from the medium"),
        (None, 5, "does not count"),
        (5, None, "does not count"),
    ],
)
def test_a_read_is_cold_when_the_medium_was_asked(before: int | None, after: int | None, reason: str) -> None:
    said = cold.not_cold(before, after, 1_000_000)
    assert said == "" if not reason else reason in said


def test_rows_are_medians_beside_limits() -> None:
    row = rate_row("disk", "x", [1.0, 5.0, 2.0], Limit.of([4.0, 9.0, 3.0], "memcpy"), "70 % of memcpy")
    assert (row.value, row.limit, row.limit_name, row.fraction) == (2.0, 4.0, "memcpy", 0.5)
    assert (row.runs, row.asked) == ((1.0, 5.0, 2.0), "70 % of memcpy")
    slow = time_row("resume", "y", [0.2, 0.1, 0.4], Limit(0.1, "never left"))
    assert (slow.value, slow.unit, slow.fraction) == (200.0, "ms", 0.5)
    assert time_row("resume", "z", [0.5]).fraction is None


def test_table_and_file(tmp_path: Path) -> None:
    command = ["bench", "tiers", "--data-dir", str(tmp_path), *SMALL, "--compressed"]
    result = CliRunner().invoke(app, [*command, "--results", str(tmp_path / "results")])
    assert result.exit_code == 0, result.output
    assert "fetch, warm: disk to device, verified" in result.output
    assert "12 blocks of 20,000 bytes" in result.output
    stored = msgspec.json.decode((tmp_path / "results" / "tiers.json").read_bytes())
    assert stored["benchmark"] == "tiers"
    load = next(row for row in stored["rows"] if row["name"].startswith("load"))
    assert load["fraction"] == pytest.approx(load["value"] / load["limit"])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--data-dir", "/no/such/folder"], "agentserve: no folder /no/such/folder"),
        (["--data-dir", "/", "--block", "3x"], "agentserve: --block: expected a size in bytes"),
    ],
)
def test_what_is_wrong_is_one_line(flags: list[str], line: str) -> None:
    result = CliRunner().invoke(app, ["bench", "tiers", "--only", "moves", *flags])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(line)


def test_a_move_that_fails_is_told() -> None:
    scene = Scene(4, 20_000)
    mover = Mover(scene.pages, scene.host, None, WallClock())
    with pytest.raises(OSError, match="fetch: there is no disk tier"):
        scene.rate(mover, Move.FETCH)
    mover.close()
