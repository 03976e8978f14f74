"""Recordings as files: whole lines, bounded, out of the way, and readable after whatever happened."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentserve.messages import GroupPages
from agentserve.records.lines import Gap, IterationRecord, Opened, RequestRecord, Status, Swapped
from agentserve.records.reader import each_line, read_records, series_files
from agentserve.records.series import FolderTaken, claimed
from agentserve.records.writer import Bounds, LineWriter
from agentserve.types import Slo


def iteration(step: int, features: dict[str, float] | None = None) -> IterationRecord:
    return IterationRecord(
        step=step,
        begin_ts=step / 10,
        scheduled_tokens=20,
        decodes=4,
        chunks=1,
        iteration_ms=12.5,
        model_ms=12.0,
        predicted_ms=11.0,
        kv_pages=(GroupPages(3, 2, 1), GroupPages(1, 0, 7)),
        swapped_bytes=Swapped(10, 20),
        binding_limit="tokens",
        limits={"tokens": 2},
        preempted=1,
        running=5,
        waiting=6,
        features=features,
    )


def request(number: int, **fields: object) -> RequestRecord:
    told: dict[str, object] = {
        "request": f"req-{number}",
        "route": "/v1/chat/completions",
        "tenant": "a",
        "session": "s",
        "turn": number,
        "policy": "default",
        "status": Status.COMPLETED,
        "reason": "stop",
        "arrival_ts": 10.0,
        "submit_ts": 10.25,
        "admit_ts": 10.5,
        "first_token_ts": 11.0,
        "every_token_ts": (1000.0, 50.0, 25.0),
        "finish_ts": 12.0,
        "prompt_tokens": 9,
        "prefix_hit_tokens": 4,
        "output_tokens": 3,
        "computed_tokens": 7,
        "preemption_count": 0,
        "queue_reasons": {"gate": 2},
        "slo": Slo(ttft=2.0),
        "slo_met": True,
    }
    return RequestRecord(**(told | fields))  # type: ignore[arg-type]


def opened() -> Opened:
    return Opened(at_ts=1.0, unix=2.0, model="m", policy="default", groups=("full", "window"))


BOUNDS = Bounds()


def writer(folder: Path, bounds: Bounds = BOUNDS, waiting: int = 1000) -> LineWriter:
    return LineWriter(folder / "requests.jsonl", bounds, opened, waiting)


def test_what_is_written_is_read_again_and_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    requests, steps = writer(folder), LineWriter(folder / "iterations.w0.jsonl", Bounds(), opened)
    told = [request(n) for n in range(50)]
    for each in told:
        requests.add(each)
    steps.add(iteration(1))
    steps.add(iteration(2, {"decodes": 4.0}))
    requests.close()
    steps.close()
    steps.close()
    found = read_records(folder)
    assert found.requests == told
    assert found.iterations == [iteration(1), iteration(2, {"decodes": 4.0})]
    assert (len(found.opened), found.missing, found.damaged) == (2, 0, 0)
    assert told[0].token_times == (11.0, 11.05, 11.075)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    line = (folder / "iterations.w0.jsonl").read_text().splitlines()[1]
    for name in (
        "scheduled_tokens",
        "iteration_ms",
        "predicted_ms",
        "KV_pages",
        "swapped_bytes",
        "binding_limit",
    ):
        assert f'"{name}":' in line
    assert '"swapped_bytes":{"in":10,"out":20}' in line


@pytest.mark.parametrize("files", [1, 3])
def test_files_are_bounded_and_the_oldest_lines_go(tmp_path: Path, files: int) -> None:
    log = writer(tmp_path, Bounds(4000, files), waiting=10_000)
    for number in range(300):
        log.add(request(number))
    log.close()
    kept = series_files(tmp_path)
    assert len(kept) == files
    assert kept[-1].name == "requests.jsonl"
    assert all(path.stat().st_size <= 4000 for path in kept)
    found = read_records(tmp_path)
    assert [each.turn for each in found.requests] == list(range(300 - len(found.requests), 300))
    assert len(found.opened) == files  # each file says by itself whose it is
    assert log.lost == 0


def test_a_torn_last_line_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    first = writer(tmp_path)
    first.add(request(1))
    first.add(request(2))
    first.close()
    whole = path.read_bytes()
    for cut in (1, 2, 100):
        path.write_bytes(whole[:-cut])
        found = read_records(path)
        assert ([each.turn for each in found.requests], found.damaged) == (
            [1, 2][: 1 + (cut == 1)],
            int(cut > 1),
        )
    again = writer(tmp_path)  # of a process that was killed; the next one goes on behind it
    again.add(request(3))
    again.close()
    found = read_records(path)
    assert ([each.turn for each in found.requests], found.damaged, len(found.opened)) == ([1, 3], 1, 2)


def test_damage_and_lines_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = writer(tmp_path)
    log.add(request(1))
    log.close()
    text = path.read_bytes()
    more = text.splitlines()[-1].replace(b'"turn":1', b'"turn":2,"of_a_later_version":[1]')
    path.write_bytes(text + b'\xff\x00{"kind"\n{"kind":"unheard_of"}\n[]\n\n' + more + b"\n")
    found = read_records(tmp_path)
    assert ([each.turn for each in found.requests], found.damaged) == ([1, 2], 3)


def test_lines_that_come_too_fast_are_counted_where_they_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        log = writer(tmp_path, waiting=10)
        for number in range(1000):
            log.add(request(number))
        log.close()
    found = read_records(tmp_path)
    assert log.lost >= 1
    assert len(found.requests) + log.lost == 1000
    assert (
        found.missing == log.lost == sum(line.lines for line in each_line(tmp_path) if isinstance(line, Gap))
    )
    assert "came too fast" in caplog.text


def test_a_line_that_cannot_be_written_costs_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = writer(tmp_path, Bounds(4000, 2))
    log.add(request(1))
    log.add(request(2, session="\ud800"))
    log.add(request(3, every_token_ts=(1.125,) * 1000))
    log.add(request(4))
    log.close()
    assert [each.turn for each in read_records(tmp_path).requests] == [1, 4]
    assert (log.lost, log.failure) == (2, "")


def test_where_nothing_can_be_written_there_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "requests.jsonl").symlink_to(tmp_path / "elsewhere")
    for folder, lines in ((tmp_path / "file" / "below", 1), (tmp_path, 2)):
        log = writer(folder)
        log.add(request(1))
        log.add(request(2))
        log.close()
        assert log.failure
        assert log.lost == 2
        assert len(caplog.records) == lines
    assert (tmp_path / "elsewhere").read_text() == "mine"


@pytest.mark.parametrize("what", ["pipe", "another user's", "a second name"])
def test_no_file_is_written_that_somebody_else_may_read(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that others may write in, they can lay out what the server will open."""
    file = tmp_path / "requests.jsonl"
    if what == "pipe":
        os.mkfifo(file)
    else:
        file.write_text("")
    if what == "another user's":
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if what == "a second name":
        os.link(file, tmp_path / "other")
    log = writer(tmp_path)
    log.add(request(1))
    log.close()
    assert "not a file of this user alone" in log.failure
    assert log.lost == 1
    assert file.stat().st_size == 0


def test_a_full_disk_ends_the_recording_with_whole_lines(tmp_path: Path) -> None:
    script = f"""
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_records as rig
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        log = rig.writer(Path({str(tmp_path)!r}))
        for number in range(100):
            log.add(rig.request(number))
        log.close()
        log.add(rig.request(100))
        print(log.failure, "|", log.lost)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.startswith("File too large |")
    assert len(done.stderr.splitlines()) == 1
    data = (tmp_path / "requests.jsonl").read_bytes()
    assert 4000 < len(data) <= 5000
    assert data.endswith(b"\n")
    found = read_records(tmp_path)
    assert found.damaged == 0
    assert [each.turn for each in found.requests] == list(range(len(found.requests)))
    assert int(done.stdout.split("|")[1]) >= 101 - len(found.requests)


def test_a_folder_is_one_servers_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with claimed(folder):
        with pytest.raises(FolderTaken, match="another server records into it"), claimed(folder):
            raise AssertionError
        with claimed(None), claimed(tmp_path / "other"):
            pass
    with claimed(folder):
        pass
    (tmp_path / "file").write_text("")
    with claimed(tmp_path / "file" / "below"):  # who writes there will say that nothing can be written
        pass
