"""What is done while the model computes: once per step, by whom, and what becomes of what it raises."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from agentserve.server.workers.meanwhile import Meanwhile


@pytest.fixture
def meanwhile() -> Iterator[Meanwhile]:
    made = Meanwhile()
    yield made
    made.close()


def test_it_is_done_on_another_thread_and_waited_for(meanwhile: Meanwhile) -> None:
    by: list[int] = []
    meanwhile.arm(lambda: by.append(threading.get_ident()))
    meanwhile.begin()
    meanwhile.begin()  # a second pass of the same step
    meanwhile.finish()
    assert len(by) == 1
    assert by[0] != threading.get_ident()
    meanwhile.finish()
    assert len(by) == 1


def test_a_step_that_never_computes_does_it_itself(meanwhile: Meanwhile) -> None:
    by: list[int] = []
    meanwhile.begin()  # nothing is to be done
    meanwhile.arm(lambda: by.append(threading.get_ident()))
    meanwhile.finish()
    assert by == [threading.get_ident()]


def test_what_it_raises_is_raised_where_it_is_waited_for(meanwhile: Meanwhile) -> None:
    def fails() -> None:
        raise OSError("no room for the log")

    for began in (True, False):
        meanwhile.arm(fails)
        if began:
            meanwhile.begin()
        with pytest.raises(OSError, match="no room"):
            meanwhile.finish()
    done: list[str] = []
    meanwhile.arm(lambda: done.append("still there"))
    meanwhile.begin()
    meanwhile.finish()
    assert done == ["still there"]
