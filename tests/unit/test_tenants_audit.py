"""The audit log: one line a request, bounded, out of the request's way."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from agentserve.server.tenants import audit
from agentserve.server.tenants.audit import AuditLog, Entry


def entry(number: int, key: str | None = "k") -> Entry:
    return Entry(float(number), f"req-{number}", "GET", 200, 0.1, tenant="a" if key else None, key=key)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_whole_private_and_in_order(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    for number in range(100):
        log(entry(number))
    log.close()
    path = tmp_path / "audit" / "audit.jsonl"
    assert [line["request"] for line in lines(path)] == [f"req-{n}" for n in range(100)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = AuditLog(tmp_path / "audit")  # a server that comes back goes on
    again(entry(100))
    again.close()
    assert len(lines(path)) == 101


def test_files_are_bounded_and_the_oldest_lines_go(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, most=1000, files=3)
    for number in range(200):
        log(entry(number))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["audit.1.jsonl", "audit.2.jsonl", "audit.jsonl"]
    assert all(path.stat().st_size <= 1000 for path in files)
    newest = [line["request"] for path in (files[1], files[0], files[2]) for line in lines(path)]
    assert newest == [f"req-{n}" for n in range(200 - len(newest), 200)]
    assert 10 < len(newest) < 60


def test_strangers_cannot_push_out_what_others_did(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, most=1000, files=2)
    log(entry(0))
    for number in range(500):
        log(entry(number, key=None))
    log.close()
    assert [line["request"] for line in lines(tmp_path / "audit.jsonl")] == ["req-0"]
    assert (tmp_path / "refused.1.jsonl").exists()


def test_a_disk_that_fails_is_told_once_and_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "WAITING", 50)
    log = AuditLog(tmp_path / "audit")
    (tmp_path / "audit").rename(tmp_path / "moved")
    with caplog.at_level(logging.ERROR):
        for number in range(20):
            log(entry(number))
        log.close()
    assert log.lost == 20
    assert len(caplog.records) == 1


def test_what_it_cannot_keep_up_with_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "WAITING", 5)
    log = AuditLog(tmp_path)
    log.close()  # nobody writes any more
    for number in range(8):
        log(entry(number))
    assert log.lost == 3


def test_without_a_folder_lines_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agentserve.audit"):
        audit.to_log(entry(7))
    assert json.loads(caplog.records[0].getMessage())["request"] == "req-7"
