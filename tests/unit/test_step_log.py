"""The step log: what is in it, that it is bounded, and that it never keeps a worker from its steps."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import msgspec
import pytest

from agentserve.core.cost import StepCost
from agentserve.core.timing.iterations import (
    LOG_VERSION,
    Log,
    LogHeader,
    Swapped,
    as_they_ran,
    encode_line,
    read_log,
    same_machine,
)
from agentserve.core.timing.tally import EVERYTHING, Attention
from agentserve.messages import TiersView
from agentserve.server.workers.step_log import KEPT, BoundedLines, StepLog
from tests.engines import Rig, groups_of
from tests.unit.test_timing_saved import HERE

HEADER = LogHeader(version=LOG_VERSION, fingerprint=HERE, groups=("full",), page_size=4, step_tokens=32)
COST = StepCost(fixed=0.01, per_token=0.001, ratio=1.5)


def run(rig: Rig, steps: StepLog) -> int:
    """Steps until nothing is to be done, each recorded; how many."""
    count = 0
    while (plan := rig.core.begin_step(rig.now)) is not None:
        result = rig.executor.run(plan)
        rig.core.finish_step(result, rig.now)
        steps.add(plan, result, rig.core.view(), rig.now)
        rig._collect()
        count += 1
    return count


def test_a_record_says_what_the_step_was_and_took(tmp_path: Path) -> None:
    rig = Rig((16, 12), cost=COST, max_batched_tokens=8)
    steps = StepLog.at(tmp_path / "log", 1 << 20, HEADER, Attention(groups_of(2), 4))
    rig.submit("a", range(20), max_tokens=3)
    rig.submit("b", range(100, 106), max_tokens=2)
    count = run(rig, steps)
    steps.close()
    log = read_log((tmp_path / "log").read_bytes())
    assert log.header == HEADER
    assert len(log.steps) == count
    assert log.damaged == 0
    first, last = log.steps[0], log.steps[-1]
    assert [step.step for step in log.steps] == list(range(1, count + 1))
    assert first.scheduled_tokens == first.load.rows == 6
    assert first.binding_limit == "tokens"
    assert first.predicted_ms == pytest.approx(10 + 6)
    assert first.bound_ms == pytest.approx(1.5 * first.predicted_ms)
    assert first.iteration_ms == pytest.approx(first.predicted_ms), "the machine keeps to the model"
    for step in log.steps:
        assert [group.used + group.cached + group.free for group in step.kv_pages] == [16, 12]
        assert step.swapped_bytes == Swapped()
    assert last.load.decodes == 1
    assert last.running == last.waiting == 0
    assert sum(step.load.samples for step in log.steps) == 3 + 2
    ran = as_they_ran([log])
    assert ran is not None
    assert (ran.steps, ran.mape, ran.exceeded) == (count, pytest.approx(0, abs=1e-6), 0)
    assert ran.width == pytest.approx(1.5)
    assert as_they_ran([Log(HEADER, (), 0)]) is None
    assert [timed.seconds for timed in log.timed] == [step.iteration_ms / 1e3 for step in log.steps]


def test_the_names_on_disk_are_those_agreed(tmp_path: Path) -> None:
    rig = Rig((16,), cost=COST)
    steps = StepLog.at(tmp_path / "log", 1 << 20, HEADER, EVERYTHING)
    rig.submit("a", range(5), max_tokens=1)
    run(rig, steps)
    steps.close()
    line = msgspec.json.decode((tmp_path / "log").read_bytes().splitlines()[1])
    assert {
        "scheduled_tokens", "iteration_ms", "predicted_ms", "KV_pages", "swapped_bytes", "binding_limit"
    } < set(line)  # fmt: skip
    assert set(line["KV_pages"][0]) == {"used", "cached", "free"}
    assert line["swapped_bytes"] == {"in": 0, "out": 0}


def test_what_was_moved_is_told_once(tmp_path: Path) -> None:
    rig = Rig((16,))
    steps = StepLog.at(tmp_path / "log", 1 << 20, HEADER, EVERYTHING)
    rig.submit("a", range(5), max_tokens=3)
    moved = iter(
        (
            {"save": (2, 0.1)},
            {"save": (2, 0.1), "load": (3, 0.1)},
            {"save": (7, 0.3), "load": (3, 0.1), "fetch": (1, 0.1)},
        )
    )
    for moves in moved:
        plan = rig.core.begin_step(rig.now)
        assert plan is not None
        result = rig.executor.run(plan)
        rig.core.finish_step(result, rig.now)
        view = msgspec.structs.replace(rig.core.view(), tiers=TiersView(block_bytes=100, moved=moves))
        steps.add(plan, result, view, rig.now)
    steps.close()
    told = [step.swapped_bytes for step in read_log((tmp_path / "log").read_bytes()).steps]
    assert told == [Swapped(0, 200), Swapped(300, 0), Swapped(100, 500)]


def test_it_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    path, line = tmp_path / "log", b"x" * 99 + b"\n"
    lines = BoundedLines(path, 1000, b"head\n")
    for number in range(200):
        lines.add(b"%03d" % number + line[3:])
    lines.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", *(f"log.{number}" for number in range(1, KEPT + 1))]
    assert all(file.stat().st_size <= 1000 for file in files)
    kept = [file.read_bytes() for file in [*reversed(files[1:]), files[0]]]
    assert all(data.startswith(b"head\n") for data in kept)
    numbers = [int(row[:3]) for data in kept for row in data.splitlines()[1:]]
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 36


def test_a_line_longer_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    lines = BoundedLines(tmp_path / "log", 10, b"head\n")
    for text in (b"a" * 50 + b"\n", b"b" * 50 + b"\n"):
        lines.add(text)
    lines.close()
    assert (tmp_path / "log").read_bytes() == b"head\n" + b"b" * 50 + b"\n"
    assert (tmp_path / "log.1").read_bytes() == b"head\n" + b"a" * 50 + b"\n"


def test_an_earlier_log_is_kept(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"earlier")
    BoundedLines(tmp_path / "log", 1000, b"head\n").close()
    assert (tmp_path / "log.1").read_bytes() == b"earlier"
    assert (tmp_path / "log").read_bytes() == b"head\n"


class Full:
    """A file on a disk that takes no more."""

    def __init__(self) -> None:
        self.tries = 0

    def write(self, data: bytes) -> int:
        self.tries += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None: ...


def test_a_full_disk_ends_the_log_and_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig((16,), cost=COST)
    lines = BoundedLines(tmp_path / "log", 1 << 20, encode_line(HEADER))
    full = Full()
    lines._file = full  # type: ignore[assignment]
    steps = StepLog(lines, EVERYTHING)
    with caplog.at_level(logging.ERROR):
        for name in ("a", "b"):
            rig.submit(name, range(5), max_tokens=2)
            assert run(rig, steps) == 2
            steps.flush()
    steps.close()
    assert full.tries == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"the step log {tmp_path / 'log'} ends here: No space left on device"
    ]


def test_a_log_that_cannot_be_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        StepLog.at(tmp_path / "no" / "log", 1 << 20, HEADER, EVERYTHING)


def test_damaged_lines_cost_themselves(tmp_path: Path) -> None:
    rig = Rig((16,), cost=COST)
    steps = StepLog.at(tmp_path / "log", 1 << 20, HEADER, EVERYTHING)
    rig.submit("a", range(5), max_tokens=6)
    count = run(rig, steps)
    steps.close()
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    lines[2] = b"\xff" + lines[2][1:]
    lines[4] = lines[4].replace(b'"step":', b'"stop":', 1)
    lines[-1] = lines[-1][:40]
    log = read_log(b"".join(lines))
    assert (len(log.steps), log.damaged) == (count - 3, 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a step log"),
        (b"\xff\n", "not a step log"),
        (b'{"kind":"else"}\n', "not a step log"),
        (encode_line(msgspec.structs.replace(HEADER, version=9)), "version 9; this is version 1"),
    ],
)
def test_what_is_no_log_is_told(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        read_log(data)
    assert "\n" not in str(caught.value)


def test_logs_of_two_machines_are_not_one() -> None:
    there = msgspec.structs.replace(HEADER, fingerprint=msgspec.structs.replace(HERE, threads=4))
    logs = [read_log(encode_line(header)) for header in (HEADER, there)]
    assert same_machine(logs[:1]) == HERE
    with pytest.raises(ValueError, match="threads: 2, not 4"):
        same_machine(logs)


def test_groups_have_their_own_pages() -> None:
    rig = Rig((16, 8))
    rig.submit("a", range(9), max_tokens=2)
    assert rig.step() is not None
    assert [group.used for group in rig.core.view().groups] == [3, 3]
    assert [group.free for group in rig.core.view().groups] == [13, 5]
