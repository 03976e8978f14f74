"""A sessions file that is damaged or deleted while the server runs: what it lost is in memory, and is on
disk again when the next start looks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from agentserve.server.sessions.changes import Check
from agentserve.server.sessions.environment import DATA, Table
from agentserve.server.sessions.store import SessionStore
from tests.api_rig import CHAT, TOOLS, settled, user
from tests.fakes import say
from tests.journal_rig import CALL, Kept, kept, said, waiting
from tests.session_files import PAGE, leaf_of, overflow_of, patch

MOVES = {"computed_tokens": 0, "pages": 0, "as_of": None}


async def facts(k: Kept) -> dict[str, Any]:
    """What is said of every session, but for what is on workers."""
    return {s.public_id: await k.rig.session(s.public_id) | MOVES for s in k.directory.sessions("default")}


async def lived(k: Kept) -> list[str]:
    """Sessions of all kinds: some at rest, one that waits for two results and has one of them, its fork."""
    for number in range(12):
        k.rig.engine.reply = say("x" * 3000)
        first = [user(f"{number}")]
        await k.rig.chat(first, session_id=f"n{number}")
        k.rig.engine.reply = say("y")
        await k.rig.chat([*first, said("x" * 3000), user("b")], session_id=f"n{number}")
    path, calls = await waiting(k)
    assert (await k.rig.post(path, {"call_id": calls[1], "content": "12:00"})).status_code == 200
    assert (await k.rig.post("/agentserve/sessions/mine/fork", {})).status_code == 201
    k.rig.engine.reply = say("ok")
    return calls


async def mended(k: Kept) -> None:
    await settled(lambda: k.journal._mender._task is not None and k.journal._mender._task.done())
    k.journal.retry().result(30)


async def test_sessions_on_a_page_that_died_are_there_after_a_restart(tmp_path: Path) -> None:
    async with kept(SessionStore(tmp_path)) as k:
        calls = await lived(k)
        key = k.directory.get("default", "n5").key.encode()
        for table, name in ((Table.HEADS, key), (Table.TURNS, key + b"\0" + bytes(7) + b"\1")):
            patch(tmp_path, leaf_of(tmp_path, table, name) * PAGE, bytes(PAGE))
        patch(tmp_path, overflow_of(tmp_path, Table.WORDS, key) * PAGE, bytes(PAGE))
        history = [user("5"), said("x" * 3000), user("b"), said("y"), user("c")]
        await k.rig.chat(history, session_id="n5")  # this meets it
        await mended(k)
        before = await facts(k)
        [told] = (await k.rig.client.get("/health")).json()["sessions_disk"]["damages"]
        assert (told["kept"], told["missing_records"] > 0) == ("damaged-1.mdb", True)
        assert "agentserve_sessions_disk_damages 1.0" in (await k.rig.client.get("/metrics")).text
    async with kept(SessionStore(tmp_path)) as k:
        assert k.journal.skipped == 0
        assert await facts(k) == before
        disk = (await k.rig.client.get("/health")).json()["sessions_disk"]
        assert disk == {"state": "ok", "skipped": 0, "damaged_files": 1}
        await goes_on(k, calls)


async def goes_on(k: Kept, calls: list[str]) -> None:
    """The session that waited takes its other result, and has kept the first."""
    k.rig.engine.reply = say("done")
    reply = await k.rig.post(
        "/agentserve/sessions/mine/tool_results", {"call_id": calls[0], "content": "sunny"}
    )
    assert reply.json()["choices"][0]["message"]["content"] == "done", reply.text


async def test_a_folder_that_was_deleted_is_written_again_from_memory(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    async with kept(SessionStore(folder)) as k:
        calls = await lived(k)
        shutil.rmtree(folder)
        await k.rig.chat([user("new")], session_id="new")
        await mended(k)
        before = await facts(k)
        assert len(before) == 15
    async with kept(SessionStore(folder)) as k:
        assert await facts(k) == before
        await goes_on(k, calls)


async def looked(k: Kept) -> None:
    """As the server does every few seconds."""
    k.journal.look()
    await settled(lambda: k.journal._looked is not None and k.journal._looked.done())
    await settled(lambda: (tried := k.journal._retry._tried) is None or tried.done())


async def test_a_folder_that_is_gone_is_found_though_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    async with kept(SessionStore(folder)) as k:
        await lived(k)
        before, written = await facts(k), (folder / DATA).stat().st_mtime_ns
        for _ in range(3):
            await looked(k)
        assert (folder / DATA).stat().st_mtime_ns == written, "a look writes nothing"
        folder.rename(tmp_path / "elsewhere")
        await looked(k)
        await mended(k)
        health = (await k.rig.client.get("/health")).json()
        assert "deleted or moved" in health["sessions_disk"]["damages"][0]["reason"]
        shutil.copytree(folder, tmp_path / "copy")
    async with kept(SessionStore(tmp_path / "copy")) as k:  # as after a kill at that moment
        assert await facts(k) == before


async def test_where_it_cannot_be_made_again_health_says_so_until_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    async with kept(SessionStore(folder)) as k:
        await lived(k)
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("in the way")
        for _ in range(2):
            await looked(k)
            health = (await k.rig.client.get("/health")).json()
            assert health["status"] == "degraded"
            assert [fault["part"] for fault in health["degraded"]] == ["sessions_disk"]
        refused = await k.rig.post(CHAT, {"messages": [user("a")]})
        assert refused.status_code == 503
        folder.unlink()
        await looked(k)
        await mended(k)
        assert (await k.rig.client.get("/health")).json()["status"] == "ok"
        shutil.copytree(folder, tmp_path / "copy")
        before = await facts(k)
    async with kept(SessionStore(tmp_path / "copy")) as k:
        assert await facts(k) == before


async def test_a_turn_that_runs_meanwhile_is_committed_and_whole(tmp_path: Path) -> None:
    async with kept(SessionStore(tmp_path)) as k:
        await k.rig.chat([user("a")], session_id="mine")
        await k.rig.chat([user("z")], session_id="other")
        k.rig.engine.reply = script = say("slow", hold_at=2)
        body = {"messages": [user("a"), said("Hello!"), user("b")], "session_id": "mine"}
        request = asyncio.create_task(k.rig.post(CHAT, body))
        await settled(lambda: len(k.rig.engine.submits) == 3)
        (tmp_path / DATA).unlink()
        assert (await k.rig.client.delete("/agentserve/sessions/other")).status_code == 200
        await settled(lambda: bool(k.journal._mender._later))  # written without the turn
        script.release.set()
        assert (await request).status_code == 200
        await mended(k)
        before = await facts(k)
    async with kept(SessionStore(tmp_path)) as k:
        assert await facts(k) == before
        assert before["mine"]["turns"] == 2


async def test_leaving_at_once_still_writes_them(tmp_path: Path) -> None:
    async with kept(SessionStore(tmp_path)) as k:
        k.rig.engine.reply = say(CALL)
        await k.rig.chat([user("a")], session_id="mine", tools=TOOLS)
        (tmp_path / DATA).unlink()
        k.rig.engine.reply = say("ok")
        await k.rig.chat([user("b")], session_id="other")
        before = await facts(k)
    async with kept(SessionStore(tmp_path)) as k:
        assert await facts(k) == before
        assert k.directory.get("default", "mine").pending


async def test_damage_that_nothing_touched_is_found_before_the_memory_is_gone(tmp_path: Path) -> None:
    async with kept(SessionStore(tmp_path)) as k:
        await lived(k)
        before = await facts(k)
        keys = [session.key.encode() for session in k.directory.sessions("default")]
        patch(tmp_path, leaf_of(tmp_path, Table.HEADS, keys[3]) * PAGE, bytes(PAGE))
    async with kept(SessionStore(tmp_path)) as k:
        assert (k.journal.skipped, k.journal.kept_aside) == (0, 1)
        assert await facts(k) == before


async def test_a_record_that_changed_is_found_too(tmp_path: Path) -> None:
    """The pages are sound, and nothing but a digest tells."""
    async with kept(SessionStore(tmp_path)) as k:
        calls = await lived(k)
        key = k.directory.get("default", "n7").key.encode()
        patch(tmp_path, overflow_of(tmp_path, Table.WORDS, key) * PAGE + 100, b"flipped")
        words = k.rig.context.chronicle.transcripts.export(k.directory.get("default", "n7").key)
        assert words
    assert [damage.missing for damage in k.journal.damages] == [1]
    async with kept(SessionStore(tmp_path)) as k:
        assert (k.journal.damages, k.journal.skipped, k.journal.kept_aside) == ([], 0, 0)
        assert k.rig.context.chronicle.transcripts.export(k.directory.get("default", "n7").key) == words
        await goes_on(k, calls)


async def test_what_is_owed_at_the_end_is_written_before_the_file_is_looked_at() -> None:
    async with kept() as k:
        await k.rig.chat([user("a")], session_id="mine")
        k.store.open.clear()
        session = k.directory.get("default", "mine")
        k.journal.keep(session, None)
        k.journal.words(session, b"last words")
        leaving = asyncio.create_task(k.journal.close())
        await asyncio.sleep(0.05)
        k.store.open.set()
        await leaving
        looked = [any(isinstance(change, Check) for change in group) for group in k.store.groups]
        assert looked == [False] * (len(looked) - 1) + [True]
        assert len(k.store.groups[-1]) == 1
        assert b"last words" in k.store.records.values()
