"""What is kept of agents: bounds, records, and what a disk gives back."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentserve.server.agents.disk import Disk
from agentserve.server.agents.history import History
from agentserve.server.agents.records import (
    AgentConfig,
    CallItem,
    Head,
    MessageItem,
    OutputItem,
    ReasoningItem,
    SavedAgent,
    Turn,
    UserItem,
)
from agentserve.server.agents.shelf import AgentsBounds, Full, Shelf
from agentserve.server.sessions.book import booked
from tests.agents_machine import MemoryBook

CONFIG = AgentConfig("agent_1", "tiny")
HALF = "half \ud800 a pair"


def opened(shelf: Shelf, name: str, *, over: bool = True) -> History:
    history = shelf.open(Head(name, "default", CONFIG, 1.0, 1.0))
    turn = Turn("turn_1", 1, 1.0, "completed" if over else "in_progress")
    history.turns.append(turn)
    shelf.keep_head(history)
    shelf.keep_turn(history, turn)
    shelf.add(history, turn, UserItem("m1", ("Hi",)))
    items = (
        ReasoningItem("r1", HALF),
        MessageItem("m2", HALF, final=False),
        CallItem("f1", "c1", "now", "{}"),
    )
    shelf.add(history, turn, *items, step=1)
    shelf.add(history, turn, OutputItem("o1", "c1", HALF))
    return history


def same(left: History, right: History) -> bool:
    return (left.head, left.turns, left.batches) == (right.head, right.turns, right.batches)


def test_the_longest_unused_goes_and_one_that_runs_stays() -> None:
    book, dropped = MemoryBook(), list[str]()
    shelf = Shelf(AgentsBounds(sessions=2), book)
    shelf.forget = lambda history: dropped.append(history.id)
    running = opened(shelf, "a", over=False)
    opened(shelf, "b")
    opened(shelf, "c")
    assert dropped == ["b"]
    assert shelf.get("default", "a") is running
    assert shelf.get("other", "a") is None
    assert not [name for name in book.records if ":b" in name]
    history = shelf.get("default", "c")
    assert history is not None
    history.turns[0].status = "in_progress"
    with pytest.raises(Full):
        opened(shelf, "d")


def test_bytes_are_bounded_and_counted() -> None:
    shelf = Shelf(AgentsBounds(bytes=100_000))
    for n in range(40):
        history = opened(shelf, f"s{n}")
        shelf.add(history, history.turns[0], MessageItem("m", "x" * 10_000), step=2)
    assert 50_000 < shelf.size_bytes < 120_000
    for history in shelf:
        shelf.drop(history)
        assert shelf.drop(history) is None
    assert shelf.size_bytes == 0


def test_all_that_a_session_was_made_of_counts() -> None:
    shelf = Shelf(AgentsBounds(bytes=100_000))
    for field in ("instructions", "name"):
        before = shelf.size_bytes
        config = AgentConfig("", "tiny", **{field: "x" * 20_000})
        shelf.open(Head(field, "default", config, 1.0, 1.0))
        assert 20_000 < shelf.size_bytes - before < 24_000


def test_saved_agents_are_bounded_in_bytes_each_tenants_and_all() -> None:
    shelf = Shelf(AgentsBounds(agents_bytes=80_000))

    def save(tenant: str, id_: str, size: int) -> None:
        config = AgentConfig(id_, "tiny", instructions="x" * size)
        shelf.save_agent(SavedAgent(tenant, config, 0.0, 0.0, {}))

    for n in range(6):
        save("a", f"a{n}", 10_000)
    with pytest.raises(Full):
        save("a", "a6", 10_000)  # of eight places the last is for others
    with pytest.raises(Full):
        save("a", "a0", 20_000)
    assert shelf.agents["a0"].config.instructions == "x" * 10_000  # as it was
    save("b", "b0", 15_000)
    with pytest.raises(Full):
        save("c", "c0", 10_000)
    shelf.drop_agent("a0")
    save("c", "c0", 8_000)
    save("b", "b0", 16_000)


def test_what_is_dropped_is_not_written_again() -> None:
    book = MemoryBook()
    shelf = Shelf(book=book)
    history = opened(shelf, "a")
    shelf.drop(history)
    shelf.keep_head(history)
    shelf.keep_turn(history, history.turns[0])
    shelf.add(history, history.turns[0], MessageItem("m", "late"), step=2)
    assert book.records == {}
    assert shelf.size_bytes == 0


def test_records_that_cannot_be_read_cost_themselves_only() -> None:
    book = MemoryBook()
    shelf = Shelf(book=book)
    first, second = opened(shelf, "a"), opened(shelf, "b")
    records = dict(book.records)
    records["i:a:2"] = b"\xff"
    records["t:b:1"] = b'{"id": 3}'
    records["s:x"] = b"[]"
    found = Shelf()
    assert found.restore(records) == 3
    assert {history.id for history in found} == {"a", "b"}
    lost = found.get("default", "a")
    assert lost is not None
    assert lost.batches == [first.batches[0], first.batches[2]]
    assert found.get("default", "b") is not second
    book.records.clear()
    for name in ("s:a", "t:a:1", "i:a:2"):
        content = shelf.encoded(name)
        assert content is not None
    assert shelf.encoded("i:a:9") is None
    assert shelf.encoded("s:nobody") is None


async def test_a_real_disk_gives_back_what_it_was_given(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "agents", lambda: 1e9, 30.0)
    shelf = Shelf(book=disk)
    disk.content_of = shelf.encoded
    kept, gone = opened(shelf, "a"), opened(shelf, "b")
    shelf.save_agent(SavedAgent("default", CONFIG, 1.0, 2.0, {"a": HALF}))
    await booked(shelf.drop(gone))
    assert shelf.failure is None
    await shelf.close()
    again = Disk(tmp_path / "agents", lambda: 1e9, 30.0)
    found = Shelf(book=again)
    assert found.restore(again.read()) == 0
    (history,) = found
    assert same(history, kept)
    assert found.agents == shelf.agents
    assert found.size_bytes > 0
    await booked(found.drop_agent("agent_1"))
    await found.close()
    last = Disk(tmp_path / "agents", lambda: 1e9, 30.0)
    assert {name.split(":")[0] for name in last.read()} == {"s", "t", "i"}
    await last.close()
