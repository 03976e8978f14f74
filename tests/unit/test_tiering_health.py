"""Whether the disk is in order: judged by its transfers, each trouble counted once."""

from __future__ import annotations

import pytest

from tiering.health import DiskHealth
from tiering.types import SHUT, Move, TierFault, TransferDone


def end(error: str = "", *faults: TierFault) -> TransferDone:
    return TransferDone(1, (not error,), 0.1, error, faults=faults)


@pytest.mark.parametrize("fault", [TierFault.CORRUPT, TierFault.MISPLACED, TierFault.MISSING])
def test_a_damaged_block_is_not_a_damaged_disk(fault: TierFault) -> None:
    health = DiskHealth()
    assert not health.judge(Move.FETCH, False, end("its checksum is wrong", fault))
    assert not health.judge(Move.FETCH, False, end("missing on disk")), "it was deleted by the first"
    assert health.error == ""


def test_a_disk_that_cannot_be_read_is_said_to_be_failing_until_it_can() -> None:
    health = DiskHealth()
    assert not health.judge(Move.FETCH, False, end("EIO", TierFault.UNREADABLE)), "writes need not wait"
    assert health.error == "EIO"
    health.judge(Move.FETCH, True, end())
    assert health.error == ""


def test_a_full_disk_stays_failing_while_it_can_be_read_and_is_counted_once() -> None:
    health = DiskHealth()
    for move in (Move.WRITE, Move.DROP, Move.WRITE):
        assert health.judge(move, False, end("no space left")), "writes wait"
        for other in (Move.FETCH, Move.DROP):
            assert not health.judge(other, True, end())
        assert health.error == "no space left" or move is Move.DROP
        assert health.faults == {TierFault.UNWRITABLE: 1}
    health.judge(Move.WRITE, True, end())
    assert health.error == ""
    health.judge(Move.WRITE, False, end("no space left"))
    assert health.faults == {TierFault.UNWRITABLE: 2}, "it is full anew"


def test_what_is_broken_for_reading_is_not_counted_again_for_writing() -> None:
    health = DiskHealth()
    health.judge(Move.FETCH, False, end("a page lies", TierFault.UNREADABLE))
    health.judge(Move.WRITE, False, end(f"{SHUT}: a page lies"))
    assert health.faults == {}, "the store has told of it"


def test_a_disk_that_fails_at_reading_and_at_writing_fails_twice_and_the_latest_is_shown() -> None:
    health = DiskHealth()
    health.judge(Move.FETCH, False, end("EIO", TierFault.UNREADABLE))
    for _ in range(2):
        assert health.judge(Move.WRITE, False, end("no space left"))
        assert (health.error, health.faults) == ("no space left", {TierFault.UNWRITABLE: 1})
    health.judge(Move.FETCH, False, end("EIO again", TierFault.UNREADABLE))
    assert health.error == "EIO again"
    health.judge(Move.FETCH, True, end())
    assert health.error == "no space left"


def test_a_disk_that_is_not_there_stays_so() -> None:
    health = DiskHealth()
    health.absent("no KV can be kept in d: Not a directory")
    assert (health.error, health.faults) == (
        "no KV can be kept in d: Not a directory",
        {TierFault.UNOPENED: 1},
    )
