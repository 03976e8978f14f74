"""`agentserve bench tiers` on small blocks: its rows, its file, and how it says what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from agentserve.bench import report, tiers
from agentserve.cli.main import app

SMALL = ["--block", "20000", "--blocks", "12", "--runs", "2"]


@pytest.fixture(autouse=True)
def no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "versions", dict)  # the distribution need not be installed here


def test_every_way_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    found = tiers.measure(tiers.Settings(tmp_path / "data", 20_000, 12, 2), lambda stage: None)
    names = [row.name for row in found.rows]
    ways = ("memcpy", "save", "save into", "load", "write", "fetch, warm", "fetch, cold")
    assert all(name.startswith(way) for name, way in zip(names, ways, strict=False))
    assert len(names) + len(found.skipped) == len(ways)
    assert all(row.value > 0 and row.unit == "GB/s" for row in found.rows)
    assert [len(row.runs) for row in found.rows[:6]] == [2, 2, 1, 2, 2, 2]
    assert list((tmp_path / "data").iterdir()) == []


def test_what_stays_in_memory_is_not_called_cold(tmp_path: Path) -> None:
    """A page that another process maps, or a file system that lives in memory: asked, not assumed."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file:
        while file.read(1 << 16):
            pass
        assert tiers._still_in_memory(file.fileno(), 1 << 20) != ""


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
    result = CliRunner().invoke(app, ["bench", "tiers", *flags])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(line)


def test_a_move_that_fails_is_told(tmp_path: Path) -> None:
    scene = tiers.Scene(tiers.Settings(tmp_path, 20_000, 4, 1))
    mover = tiers.Mover(scene.pages, scene.host, None, tiers.WallClock())
    with pytest.raises(OSError, match="fetch: there is no disk tier"):
        scene.rate(mover, tiers.Move.FETCH)
    mover.close()
