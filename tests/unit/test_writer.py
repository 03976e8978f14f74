"""Group commit: order, one sync for many, failures that are made up for, and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.changes import Change, Delete, Forget, Put
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.writer import Failure, GroupWriter
from tests.session_stores import MemoryStore


def head(name: bytes, content: bytes = b"") -> Put:
    return Put(Table.HEADS, name, content)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def writer(store: MemoryStore) -> Iterator[GroupWriter]:
    made = GroupWriter(store.write, lambda: 1000.0)
    yield made
    store.open.set()
    assert made.close(30)


def test_the_log_says_what_cannot_be_kept(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    writer = GroupWriter(store.write, lambda: 0.0, what="responses")
    store.error = "disk full"
    with pytest.raises(StorageError):
        writer.put(head(b"a"), lasting=True).result(30)
    store.error = ""
    writer.put(head(b"b"), lasting=True).result(30)
    assert writer.close(30)
    said = [record.message for record in caplog.records]
    assert said == ["responses cannot be kept: disk full", "responses are kept again"]


def test_nothing_is_done_before_it_is_written(store: MemoryStore, writer: GroupWriter) -> None:
    store.open.clear()
    first = writer.put(head(b"a"), lasting=True)
    assert store.asked.acquire(timeout=30)
    assert not first.done()
    store.open.set()
    first.result(30)
    assert store.records == {(Table.HEADS, b"a"): b""}


def test_what_comes_while_the_disk_writes_shares_the_next_sync(
    store: MemoryStore, writer: GroupWriter
) -> None:
    store.open.clear()
    futures = [writer.put(head(b"a"), lasting=True)]
    assert store.asked.acquire(timeout=30)
    futures += [writer.put(head(b"%d" % i), head(b"a", b"%d" % i), lasting=i % 2 == 0) for i in range(9)]
    futures.append(writer.put(Forget(b"0"), lasting=True))
    store.open.set()
    for future in futures:
        future.result(30)
    rest = [*(head(b"%d" % i) for i in range(9)), head(b"a", b"8"), Forget(b"0")]
    assert store.groups == [[head(b"a")], rest]  # in order, and only the last word on each record


def test_a_group_that_fails_is_made_up_for_but_for_its_turns(
    store: MemoryStore, writer: GroupWriter, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = "No space left on device"
    lasting = writer.put(head(b"a", b"1"), Delete(Table.TURNS, b"x"), lasting=True)
    with pytest.raises(StorageError, match="No space left"):
        lasting.result(30)
    turn = writer.put(head(b"b"), lasting=False)
    with pytest.raises(StorageError, match="No space left"):
        turn.result(30)
    again = writer.put(head(b"a", b"2"), lasting=True)
    assert isinstance(again.exception(30), StorageError)
    assert writer.failure == Failure(1000.0, "No space left on device")
    assert store.records == {}
    store.error = ""
    writer.put(head(b"c"), lasting=False).result(30)
    assert writer.failure is None
    assert store.groups == [[Delete(Table.TURNS, b"x"), head(b"a", b"2"), head(b"c")]]
    writer.put(head(b"d"), lasting=False).result(30)
    assert store.groups[-1] == [head(b"d")]
    said = [record.message for record in caplog.records]
    assert said == ["sessions cannot be kept: No space left on device", "sessions are kept again"]


def test_an_error_of_ours_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    broken = threading.Event()
    broken.set()

    def write(changes: list[Change]) -> None:
        if broken.is_set():
            raise KeyError("not a storage error")

    writer = GroupWriter(write, lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="internal error"):
        writer.put(head(b"a"), lasting=True).result(30)
    assert "writing sessions failed" in caplog.text
    broken.clear()
    writer.put(head(b"a"), lasting=True).result(30)
    assert writer.close(30)


def test_nobody_can_take_a_write_back(store: MemoryStore, writer: GroupWriter) -> None:
    store.open.clear()
    future = writer.put(head(b"a"), lasting=True)
    assert not future.cancel()
    store.open.set()
    future.result(30)


def test_closing_writes_what_is_left_and_refuses_what_comes(store: MemoryStore) -> None:
    writer = GroupWriter(store.write, lambda: 0.0)
    store.open.clear()
    left = [writer.put(head(b"%d" % i), lasting=False) for i in range(5)]
    assert writer.close(0.0) is False  # the disk hangs
    with pytest.raises(StorageError, match="shutting down"):
        writer.put(head(b"late"), lasting=True).result(30)
    store.open.set()
    assert writer.close(30)
    assert all(future.done() and future.exception() is None for future in left)
    assert len(store.records) == 5


def test_a_writer_that_was_never_used_can_be_closed() -> None:
    assert GroupWriter(MemoryStore().write, lambda: 0.0).close(0.0)


def test_a_disk_that_hangs_after_it_failed_does_not_hide_why(store: MemoryStore) -> None:
    made = GroupWriter(store.write, lambda: 1000.0, patience=0.01)
    store.error = "No space left on device"
    assert isinstance(made.put(head(b"a"), lasting=True).exception(30), StorageError)
    store.asked.acquire()
    store.open.clear()
    late = made.put(head(b"b"), lasting=True)
    assert store.asked.acquire(timeout=30)
    late.overdue()
    assert made.hung
    assert made.failure == Failure(1000.0, "No space left on device")
    store.open.set()
    assert made.close(30)
