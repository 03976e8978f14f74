"""Responses that are kept, against a plain model of them; and the same on disk."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentserve.server.http.responses.conversations import Conversation, Conversations
from agentserve.server.http.responses.desk import Desk, DeskBounds
from agentserve.server.http.responses.diagnostics import Compared
from agentserve.server.http.responses.records import Records
from agentserve.server.http.responses.shelf import Kept, Shelf

TTL = 100.0
MOST = 12


class Wall:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def kept(id_: str, created: float, parent: str | None = None, **more: Any) -> Kept:
    names = (f"item-{id_}",)
    return Kept(id_, created, b"[]", b'{"output":[]}', parent=parent, names=names, **more)


class ShelfHistory(RuleBasedStateMachine):
    """Puts, deletions, holds, time: an ancestor is never gone before what goes on from it."""

    def __init__(self) -> None:
        super().__init__()
        self.wall = Wall()
        self.shelf = Shelf(self.wall, max_count=MOST, max_bytes=1 << 20, ttl=TTL)
        self.made: dict[str, Kept] = {}
        self.deleted: set[str] = set()
        self.held: list[str] = []
        self.newest = ""

    def alive(self) -> list[str]:
        return [id_ for id_ in self.made if self.shelf.get(id_) is not None]

    @rule(data=st.data(), follows=st.booleans())
    def put(self, data: Any, follows: bool) -> None:
        parent = data.draw(st.sampled_from(self.alive())) if follows and self.alive() else None
        id_ = str(len(self.made))
        self.wall.at += 1
        self.made[id_] = kept(id_, self.wall.at - data.draw(st.sampled_from([0.0, 0.0, 20.5])), parent)
        if parent is not None:
            self.shelf.hold(parent)
        self.shelf.put(self.made[id_])
        self.newest = id_
        if parent is not None:
            self.shelf.release(parent)
        assert self.shelf.get(id_) is not None or self.wall.at - self.made[id_].created >= TTL

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def delete(self, data: Any) -> None:
        id_ = data.draw(st.sampled_from(self.alive()))
        self.shelf.delete(id_)
        self.deleted.add(id_)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        id_ = data.draw(st.sampled_from(self.alive()))
        self.shelf.hold(id_)
        self.held.append(id_)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.shelf.release(self.held.pop())

    @rule(seconds=st.sampled_from([1.0, 30.0, TTL]))
    def wait(self, seconds: float) -> None:
        self.wall.at += seconds
        self.shelf.expire()

    @invariant()
    def chains_are_whole(self) -> None:
        there = {one.id for one in self.shelf}
        for id_ in self.alive():
            assert id_ not in self.deleted
            chain = self.shelf.chain(id_)
            assert chain is not None
            expected: list[str] = []
            parent: str | None = id_
            while parent is not None:
                expected.append(parent)
                parent = self.made[parent].parent
            assert [one.id for one in chain] == expected[::-1]
            owner = self.shelf.owner("default", f"item-{id_}")
            assert owner is not None
            assert owner.id == id_
        assert set(self.held) <= there

    @invariant()
    def books_agree(self) -> None:
        there = list(self.shelf)
        assert len(there) == len(self.shelf)
        assert self.shelf.size_bytes == sum(one.cost for one in there)
        parents = {one.parent for one in there} | set(self.held)
        leaves = [one for one in there if one.id not in parents]
        assert not any(one.hidden for one in leaves), "nobody can name it, and nothing goes on from it"
        # Beyond the bound only by what cannot go, and what came last; nothing is let go of without need.
        assert len(there) <= MOST or {one.id for one in leaves} <= {self.newest}
        gone = set(self.made) - {one.id for one in there} - self.deleted
        old = {id_ for id_ in gone if self.wall.at - self.made[id_].created >= TTL}
        assert gone == old or len(self.made) > MOST


TestShelf = ShelfHistory.TestCase
TestShelf.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_bytes_are_bounded_too() -> None:
    shelf = Shelf(lambda: 0.0, max_count=1000, max_bytes=20_000, ttl=1.0)
    for number in range(50):
        shelf.put(Kept(str(number), float(-number % 7), b"x" * 1000, b"{}"))
    assert shelf.size_bytes <= 20_000
    assert 10 <= len(shelf) < 20


def test_a_response_is_not_what_makes_room_for_itself() -> None:
    shelf = Shelf(lambda: 0.0, max_count=2, max_bytes=20_000, ttl=1.0)
    for number in (5, 6):
        shelf.put(kept(str(number), float(number)))
    shelf.put(kept("0", 0.0))  # it was begun before the others, and took long
    assert sorted(one.id for one in shelf) == ["0", "6"]
    large = Kept("1", 1.0, b"x" * 50_000, b"{}")
    shelf.put(large)
    assert [one.id for one in shelf] == ["1"]
    shelf.put(large)  # its end
    assert [one.id for one in shelf] == ["1"]
    shelf.put(kept("7", 7.0))
    assert [one.id for one in shelf] == ["7"]
    assert shelf.size_bytes == kept("7", 7.0).cost


def test_room_is_made_as_soon_as_something_may_go() -> None:
    shelf = Shelf(lambda: 0.0, max_count=2, max_bytes=20_000, ttl=1.0)
    for id_ in ("0", "1"):
        shelf.put(kept(id_, float(id_)))
        shelf.hold(id_)
    shelf.put(kept("2", 2.0))
    assert len(shelf) == 3
    shelf.release("0")
    assert sorted(one.id for one in shelf) == ["1", "2"]
    shelf.put(kept("3", 3.0))
    assert sorted(one.id for one in shelf) == ["1", "3"]


def test_a_long_chain_goes_at_once() -> None:
    """Without a call for each of them."""
    shelf = Shelf(lambda: 0.0, max_count=10_000, max_bytes=1 << 30, ttl=1.0)
    for number in range(5000):
        parent = str(number - 1) if number else None
        shelf.put(kept(str(number), 0.0, parent, hidden=number < 4999))
    assert len(shelf.chain("4999") or ()) == 5000
    shelf.delete("4999")
    assert len(shelf) == 0
    assert shelf.size_bytes == 0


def test_conversations_are_bounded_and_busy_ones_stay() -> None:
    kept_ = Conversations(max_count=3, max_bytes=1 << 20)
    kept_.open(Conversation("conv_0", 0.0))
    kept_.busy.add("conv_0")
    for number in range(1, 6):
        kept_.open(Conversation(f"conv_{number}", 0.0), [{"id": "x"}])
    assert kept_.get("conv_0") is not None
    assert len(kept_) == 3
    assert kept_.size_bytes == sum(c.cost for n in range(6) if (c := kept_.get(f"conv_{n}")))
    kept_.delete("conv_0")
    assert len(kept_) == 2


async def test_all_of_it_is_there_after_a_restart(tmp_path: Path) -> None:
    def opened() -> Desk:
        return Desk(lambda: 50.0, records=Records(tmp_path / "r", lambda: 50.0, 10.0))

    desk = opened()
    desk.shelf.put(kept("resp_a", 1.0))
    desk.shelf.put(kept("resp_b", 2.0, "resp_a", sequence=9, session="s"))
    desk.shelf.put(kept("resp_c", 3.0))
    desk.shelf.put(kept("resp_run", 4.0, "resp_b", running=True))
    desk.shelf.delete("resp_c")
    desk.shelf.delete("resp_a")
    made = Conversation("conv_1", 5.0, {"a": "b"})
    desk.conversations.open(made, [{"id": "x", "type": "message"}, {"id": "gone"}])
    desk.conversations.add(made, [{"id": "y"}], "s")
    desk.conversations.add(made, [{"id": "z"}], "s")
    for item in ("gone", "z"):
        desk.conversations.remove(made, item)
    desk.conversations.open(Conversation("conv_2", 5.0), [{"id": "x"}])
    desk.conversations.delete("conv_2")
    with pytest.raises(ValueError, match="another server"):
        opened()
    await desk.close()

    desk = opened()
    assert desk.records is not None
    assert desk.records.skipped == 0
    assert desk.shelf.get("resp_a") is None
    assert desk.shelf.get("resp_b") == kept("resp_b", 2.0, "resp_a", sequence=9, session="s")
    assert [one.id for one in desk.shelf.chain("resp_b") or ()] == ["resp_a", "resp_b"]
    assert desk.shelf.get("resp_c") is None
    run = desk.shelf.get("resp_run")
    assert run is not None
    assert (run.running, run.shown()["status"], run.shown()["error"]["code"]) == (
        False,
        "failed",
        "server_error",
    )
    back = desk.conversations.get("conv_1")
    assert back is not None
    assert (back.head(), back.entries(), back.cost) == (made.head(), made.entries(), made.cost)
    assert [(entry.number, entry.id) for entry in back.entries()] == [(0, "x"), (2, "y")]
    assert (back.next, back.session) == (4, "s")
    assert desk.conversations.size_bytes == back.cost
    assert desk.conversations.get("conv_2") is None
    await desk.close()


async def test_a_turn_writes_what_is_new(tmp_path: Path) -> None:
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    desk = Desk(lambda: 0.0, records=records)
    written: list[int] = []
    write = records.write

    def counting(changes: Any) -> Any:
        written.append(sum(len(content or b"") for _, content in changes))
        return write(changes)

    records.write = counting  # type: ignore[method-assign]
    made = Conversation("conv_1", 0.0)
    desk.conversations.open(made)
    for turn in range(300):
        desk.conversations.add(made, [{"id": f"item-{turn}-{n}", "text": "x" * 100} for n in range(2)])
    assert max(written) < 600
    assert made.count == 600
    await desk.close()
    again = Desk(lambda: 0.0, records=Records(tmp_path / "r", lambda: 0.0, 10.0))
    back = again.conversations.get("conv_1")
    assert back is not None
    assert back.entries() == made.entries()
    again.conversations.delete("conv_1")
    await again.close()
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    assert (records.conversations, records.parts) == ([], {})
    await records.close()


async def test_a_conversation_that_lost_items_is_not_taken_for_whole(tmp_path: Path) -> None:
    desk = Desk(lambda: 0.0, records=Records(tmp_path / "r", lambda: 0.0, 10.0))
    for name in ("conv_1", "conv_2", "conv_3"):
        desk.conversations.open(Conversation(name, 0.0), [{"id": "a"}])
        desk.conversations.add(desk.conversations._kept[name], [{"id": "b"}])
    assert desk.records is not None
    desk.records.drop("part_conv_1:0")
    desk.records.drop("conv_2")
    await desk.close()
    desk = Desk(lambda: 0.0, records=Records(tmp_path / "r", lambda: 0.0, 10.0))
    assert desk.records is not None
    assert desk.records.skipped == 2
    assert [desk.conversations.get(f"conv_{n}") is not None for n in (1, 2, 3)] == [False, False, True]
    await desk.close()
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)  # it is told once, and gone from the disk
    assert ([head.id for head in records.conversations], list(records.parts)) == (["conv_3"], ["conv_3"])
    await records.close()


async def test_a_record_that_cannot_be_read_costs_itself(tmp_path: Path) -> None:
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    records.put("resp_a", b"\xc1 no msgpack")
    records.put("conv_a", b"\xc1")
    desk = Desk(lambda: 0.0, records=records)
    desk.shelf.put(kept("resp_b", 1.0))
    await desk.close()
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    assert records.skipped == 2
    assert [one.id for one in records.responses] == ["resp_b"]
    await records.close()


async def test_a_file_that_is_deleted_while_it_is_used_is_written_again(tmp_path: Path) -> None:
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    desk = Desk(lambda: 0.0, records=records)
    talk = Conversation("conv_1", 0.0)
    desk.conversations.open(talk, [{"id": "x"}])
    desk.conversations.add(talk, [{"id": "y"}])
    first = desk.shelf.put(kept("resp_a", 1.0))
    assert first is not None
    first.result(10)
    (tmp_path / "r" / "data.mdb").unlink()
    second = desk.shelf.put(kept("resp_b", 2.0))
    assert second is not None
    second.result(10)
    desk.shelf.put(kept("resp_c", 3.0))
    await desk.close()
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    assert {one.id for one in records.responses} == {"resp_a", "resp_b", "resp_c"}
    assert [head.count for head in records.conversations] == [2]
    assert sorted(records.parts["conv_1"]) == [0, 1]
    await records.close()


def test_recent_prompts_and_events_are_bounded() -> None:
    desk = Desk(lambda: 0.0, DeskBounds(compared_bytes=10_000))
    for number in range(20):
        desk.remember("t", str(number), Compared(array("i", [0] * 1000), 500, {}))
    assert desk.compared("t", "0") is None
    assert desk.compared("t", "19") is not None
