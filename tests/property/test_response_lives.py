"""Responses that are made, read, left, cancelled and deleted in any order, by servers that are restarted
and killed: nothing stays behind, what was told is there, and every stream is in order (INV-66, INV-67)."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.server.http.responses.desk import Desk, DeskBounds
from agentserve.server.http.responses.records import Records
from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.environment import DATA
from agentserve.types import FinishReason
from tests.api_rig import Rig, settled
from tests.fakes import Script, ScriptedEngine, say
from tests.responses_rig import ENDS, RESPONSES, Call, check_items

CONVERSATIONS = "/v1/conversations"
KINDS = ["new", "new", "on", "on", "talk", "talk", "release", "leave", "cancel", "delete"]
KINDS += ["read", "read", "read", "poll"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*KINDS, *KINDS, "restart", "kill", "full", "full"]),
        st.integers(0, 10**6),
        st.sampled_from(["stream", "whole", "background", "background stream"]),
        st.sampled_from(["plain", "held", "held", "held", "broken"]),
        st.booleans(),  # stored
    ),
    min_size=4,
    max_size=16,
)


@dataclass
class Made:
    """What is known of one request for a response."""

    word: str
    script: Script
    call: Call
    stored: bool
    background: bool
    talk: str | None
    id: str = ""
    over: bool = False


@dataclass
class Reading:
    call: Call
    after: int | None


@dataclass
class World:
    folder: Path
    bounds: DeskBounds
    made: list[Made] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)  # told as done and stored, by id
    deleted: set[str] = field(default_factory=set)
    talks: dict[str, list[str]] = field(default_factory=dict)  # what users said in them, as far as was told
    unsure: set[str] = field(default_factory=set)  # what was said when the server died
    files: list[bytes] = field(default_factory=list)  # the file after each write
    full: bool = False  # the disk takes nothing
    count: int = 0

    # --- the server ----------------------------------------------------------------------

    def start(self) -> None:
        records = Records(self.folder / "r", lambda: 0.0, 30.0)
        assert (records.skipped, list(records.damages)) == (0, [])
        write = records._store.write

        def written(changes: Any) -> None:
            time.sleep(0.001)  # a disk takes longer than a client needs to go on
            if self.full:
                raise StorageError("no space left")
            write(changes)
            self.files.append((self.folder / "r" / DATA).read_bytes())

        records._writer._write = written
        self.desk = Desk(lambda: 0.0, self.bounds, records)
        assert records.skipped == 0
        self.rig = Rig(ScriptedEngine(max_model_len=60_000), responses=self.desk)

    async def stop(self) -> None:
        """As when the drain of a server is over."""
        self.running = [one for one in self.made if not one.over]
        self.unsure |= {one.word for one in self.running if one.talk is not None}
        for call in [*(one.call for one in self.running), *(reading.call for reading in self.readings)]:
            call.task.cancel()
            await asyncio.gather(call.task, return_exceptions=True)
        await self.rig.context.background.stop()
        await self.check_rest()
        await self.desk.close()
        self.made, self.readings = [], []

    async def restart(self) -> None:
        await self.stop()
        self.start()
        await self.check_after_start()

    async def kill(self) -> None:
        """The server dies between two writes: what is on disk then is all there is."""
        file = self.files[-1] if self.files else None
        await self.stop()
        self.folder = self.folder / "next"
        (self.folder / "r").mkdir(parents=True, mode=0o700)
        if file is not None:
            (self.folder / "r" / DATA).write_bytes(file)
        self.start()
        await self.check_after_start()

    async def check_after_start(self) -> None:
        for one in self.running:
            if one.background and one.id and one.id not in self.deleted:
                shown = await self.get(f"{RESPONSES}/{one.id}")
                if shown["status"] in ("failed", "cancelled"):
                    assert shown["output"] == []
                self.kept[one.id] = shown
        await self.check_kept()

    # --- what clients do -------------------------------------------------------------------

    async def step(self, kind: str, pick: int, how: str, says: str, stored: bool) -> None:
        running = [one for one in self.made if not one.over]
        behind = [one for one in running if one.background and one.id]
        if kind in ("new", "on", "talk"):
            await self.create(kind, pick, how, says, stored)
        elif kind == "release" and running:
            running[pick % len(running)].script.release.set()
            await self.learn(running[pick % len(running)])
        elif kind == "leave" and running:
            await self.leave(running[pick % len(running)])
        elif kind == "cancel" and behind:
            one = behind[pick % len(behind)]
            shown = await self.call("POST", f"{RESPONSES}/{one.id}/cancel")
            assert (shown["status"], shown["output"]) == ("cancelled", [])
            await self.learn(one)
        elif kind == "delete" and (behind or self.kept):
            ids = [*self.kept, *(one.id for one in behind)]
            await self.delete(ids[pick % len(ids)])
        elif kind == "read" and (behind or self.kept):
            ids = [*self.kept, *(one.id for one in behind)]
            self.read(ids[pick % len(ids)], None if pick % 3 == 0 else pick % 11)
        elif kind == "poll" and behind:
            shown = await self.get(f"{RESPONSES}/{behind[pick % len(behind)].id}")
            assert shown["status"] in ("queued", "in_progress")
        elif kind == "full":
            await self.fail(pick, how)
        elif kind == "restart":
            await self.restart()
        elif kind == "kill":
            await self.kill()

    async def create(self, kind: str, pick: int, how: str, says: str, stored: bool) -> None:
        self.count += 1
        word = f"word{self.count}"
        body: dict[str, Any] = {"model": "tiny", "input": word, "stream": "stream" in how}
        background = "background" in how
        stored = stored or background
        body |= {"background": background, "store": stored}
        if kind == "on" and self.kept:
            body["previous_response_id"] = list(self.kept)[pick % len(self.kept)]
        if kind == "talk":
            if not self.talks or pick % 4 == 0:
                self.talks[(await self.call("POST", CONVERSATIONS, {}))["id"]] = []
            body["conversation"] = list(self.talks)[pick % len(self.talks)]
        text = f"said{self.count} " * 3
        script = say(text, hold_at=3) if says == "held" else say(text)
        if says == "broken":
            script = Script(list(b"He"), reason=FinishReason.ERROR, error="it broke")
        self.rig.engine.reply = script
        before = len(self.rig.engine.submits)
        call = Call(self.rig, "POST", RESPONSES, body)
        await settled(lambda: call.task.done() or len(self.rig.engine.submits) > before)
        one = Made(word, script, call, stored, background, body.get("conversation"))
        if call.task.done() and call.status >= 400:
            self.check_refusal(one, says)
            return
        self.made.append(one)
        if background:
            await settled(lambda: b'"id":"resp_' in call.content)
            one.id = "resp_" + call.content.split(b'"id":"resp_')[1].split(b'"')[0].decode()
        if says != "held":
            await self.learn(one)

    async def fail(self, pick: int, how: str) -> None:
        """The first finds out that the disk takes nothing, the second is refused; nothing came of either."""
        self.full = True
        records = self.desk.records
        assert records is not None
        for nth in range(2):
            known = records.failure is not None  # so it is after the first, and where it failed before
            self.count += 1
            body: dict[str, Any] = {"model": "tiny", "input": f"word{self.count}", "stream": "stream" in how}
            body["background"] = "background" in how
            free = [id_ for id_ in self.talks if id_ not in self.desk.conversations.busy]
            if free and pick % 2:
                body["conversation"] = free[pick % len(free)]
            elif self.kept and pick % 5:
                body["previous_response_id"] = list(self.kept)[pick % len(self.kept)]
            self.rig.engine.reply = say("it is not heard")
            before = len(self.rig.engine.submits)
            call = Call(self.rig, "POST", RESPONSES, body)
            await call.task
            if call.status == 200:
                assert (known, how) == (False, "stream")
                assert self.check_stream(call, None)["status"] == "failed"
            else:
                assert call.status == 503
            assert len(self.rig.engine.submits) - before == (not known and not body["background"])
            assert not (nth and not known)
        self.full = False

    def check_refusal(self, one: Made, says: str) -> None:
        if one.call.status == 500:
            assert says == "broken"
            return
        assert one.call.status == 409, one.call.content
        assert any(other.talk == one.talk and not other.over for other in self.made)  # it is locked

    async def learn(self, one: Made) -> None:
        """What became of it, once it is over."""
        one.over = True
        if one.background:
            await settled(lambda: (live := self.desk.live(one.id)) is None or live.over)
            if self.desk.shelf.get(one.id) is None:
                return
            shown = await self.get(f"{RESPONSES}/{one.id}")
        else:
            await asyncio.gather(one.call.task)
            if one.call.status != 200:
                assert one.call.status == 500
                return
            text = one.call.content.startswith(b"event: ")
            shown = self.check_stream(one.call, None) if text else json_of(one.call)
            assert not one.stored or shown["id"].encode() in self.files[-1]
        assert shown["status"] in ("completed", "failed", "cancelled")
        if one.stored:
            self.kept[shown["id"]] = shown
        if one.talk is not None and shown["status"] == "completed":
            self.talks[one.talk].append(one.word)

    async def leave(self, one: Made) -> None:
        """The client closes its connection."""
        one.call.gone.set()
        await settled(one.call.task.done)
        if not one.background:
            one.over = True
            await settled(lambda: not self.desk.conversations.busy or one.talk is None or self.busy_else(one))

    def busy_else(self, one: Made) -> bool:
        return any(other.talk == one.talk and not other.over for other in self.made)

    async def delete(self, id_: str) -> None:
        await self.call("DELETE", f"{RESPONSES}/{id_}")
        self.deleted.add(id_)
        self.kept.pop(id_, None)
        for one in self.made:
            one.over = one.over or one.id == id_

    def read(self, id_: str, after: int | None) -> None:
        query = "stream=true" + ("" if after is None else f"&starting_after={after}")
        self.readings.append(Reading(Call(self.rig, "GET", f"{RESPONSES}/{id_}", query=query), after))

    async def call(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        call = Call(self.rig, method, path, body)
        await call.task
        assert call.status == status, call.content
        return json_of(call)

    async def get(self, path: str, status: int = 200) -> Any:
        return await self.call("GET", path, status=status)

    # --- what must hold --------------------------------------------------------------------

    def check_stream(self, call: Call, after: int | None) -> Any:
        """In order and without a gap, but before the end: of events that are kept no longer it alone is
        told, with all they said."""
        *events, done = call.events()
        assert done == "[DONE]"
        numbers = [event["sequence_number"] for event in events]
        if not events:
            return None  # its reader has them all
        first = 0 if after is None else after + 1
        assert numbers[:-1] == list(range(first, first + len(numbers) - 1))
        assert numbers[-1] >= first + len(numbers) - 1
        assert [event["type"] for event in events if event["type"] in ENDS] == [events[-1]["type"]]
        if after is None and numbers == list(range(len(numbers))):
            check_items(events)
        return events[-1]["response"]

    def check_bounds(self) -> None:
        lives, shelf = self.desk.lives, self.desk.shelf
        there = [*lives._running.values(), *lives._over.values()]
        assert lives.size_bytes == sum(live.size_bytes for live in there) <= self.bounds.events_bytes
        assert all(live.window_bytes <= self.bounds.one_events_bytes for live in there)
        assert shelf.size_bytes == sum(kept.cost for kept in shelf)
        talks = self.desk.conversations
        assert talks.size_bytes == sum(one.cost for one in talks._kept.values())

    async def check_rest(self) -> None:
        """Nothing runs any more, and nothing is held for it."""
        await settled(lambda: not len(self.rig.context.background))
        desk = self.desk
        assert (desk.lives.running, desk.lives._running) == (0, {})
        assert not desk.conversations.busy
        parents = Counter(kept.parent for kept in desk.shelf if kept.parent is not None)
        assert desk.shelf._children == parents
        await settled(lambda: not self.rig.engine.live)
        self.rig.check_rest()
        self.check_bounds()

    async def check_kept(self) -> None:
        for id_, shown in self.kept.items():
            assert await self.get(f"{RESPONSES}/{id_}") == shown
            self.read(id_, None)
            reading = self.readings.pop()
            await reading.call.task
            assert self.check_stream(reading.call, None) == shown
            await self.get(f"{RESPONSES}/{id_}/input_items")
        for id_ in self.deleted:
            await self.get(f"{RESPONSES}/{id_}", 404)
        for id_, words in self.talks.items():
            items = (await self.get(f"{CONVERSATIONS}/{id_}/items"))["data"][::-1]
            assert len({item["id"] for item in items}) == len(items)
            said = [item["content"][0]["text"] for item in items if item["role"] == "user"]
            assert [word for word in said if word not in self.unsure] == words

    def check_files(self) -> None:
        """A server that died after any of the writes finds records that agree with each other."""
        files, self.files = self.files, self.files[-1:]
        for file in files:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / DATA).write_bytes(file)
                records = Records(Path(folder), lambda: 0.0, 30.0)
                assert (records.skipped, list(records.damages)) == (0, [])
                desk = Desk(lambda: 0.0, self.bounds, records)
                assert records.skipped == 0  # of conversations, too
                for kept in desk.shelf:
                    assert kept.shown()["status"] in ("completed", "failed", "cancelled", "incomplete")
                    assert kept.hidden or desk.shelf.chain(kept.id) is not None
                records._writer.close(10.0)
                records._store.close()

    async def end(self) -> None:
        for one in [one for one in self.made if not one.over]:
            one.script.release.set()
            await self.learn(one)
        for reading in self.readings:
            await asyncio.gather(reading.call.task)
            if reading.call.status == 200:
                self.check_stream(reading.call, reading.after)
        await self.check_rest()
        await self.check_kept()
        for kept in list(self.desk.shelf):
            # Of what failed at once, its client heard no more than that.
            assert kept.id in self.kept or kept.hidden or kept.shown()["status"] == "failed"
            if not kept.hidden:
                await self.delete(kept.id)
        assert (len(self.desk.shelf), self.desk.shelf.size_bytes) == (0, 0)
        assert (len(self.desk.lives), self.desk.lives.size_bytes) == (0, 0)
        await self.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def json_of(call: Call) -> Any:
    return json.loads(call.content)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.sampled_from([2500, 2500, 8 << 20]))
def test_whatever_happens_to_responses(steps: list[Any], most: int) -> None:
    async def run(folder: Path) -> None:
        world = World(folder, DeskBounds(one_events_bytes=most, events_bytes=4 * most))
        world.start()
        for step in steps:
            await world.step(*step)
            world.check_bounds()
            world.check_files()
        await world.end()
        world.check_files()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
