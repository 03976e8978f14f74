"""Forks of sessions, on a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import TOOLS, Rig, hermes, settled, user
from tests.fakes import ScriptedEngine, say
from tests.waiting_sessions import Waiting, path, waiting


async def spoken(rig: Rig) -> tuple[str, list[dict[str, Any]]]:
    """A session of three turns, and its messages."""
    messages: list[dict[str, Any]] = []
    name = ""
    for word in ("one", "two", "three"):
        rig.engine.reply = say(f"I say {word}.")
        reply = await rig.chat([*messages, user(word)])
        name = reply["session_id"]
        messages += [user(word), {"role": "assistant", "content": f"I say {word}."}]
    return name, messages


async def test_a_fork_shares_history_and_goes_its_own_way() -> None:
    rig = Rig()
    name, messages = await spoken(rig)
    reply = await rig.post(path(name, "fork"), b"")
    assert reply.status_code == 201
    child = reply.json()
    assert (child["parent"], child["state"], child["messages"], child["turns"]) == (name, "IDLE", 6, 3)
    parent_key = rig.engine.submits[0].session
    [(source, child_key, length)] = rig.engine.forked
    assert (source, length) == (parent_key, child["tokens"])
    rig.engine.reply = say("Child.")
    went = await rig.chat([*messages, user("four")], session_id=child["id"])
    assert went["session_id"] == child["id"]
    assert rig.engine.submits[-1].session == child_key
    rig.engine.reply = say("Parent.")
    went = await rig.chat([*messages, user("four")], session_id=name)
    assert went["session_id"] == name
    assert rig.engine.submits[-1].tokens == rig.engine.submits[-2].tokens
    rig.check_rest()


async def test_a_fork_at_an_earlier_turn() -> None:
    rig = Rig()
    name, messages = await spoken(rig)
    child = (await rig.post(path(name, "fork"), {"at_turn": 2})).json()
    assert (child["messages"], child["turns"]) == (4, 2)
    rig.engine.reply = say("Otherwise.")
    went = await rig.chat([*messages[:4], user("else")], session_id=child["id"])
    assert went["session_id"] == child["id"]
    prompt, before = (unpack_tokens(rig.engine.submits[i].tokens) for i in (-1, 1))
    assert prompt[: len(before)] == before
    assert (await rig.session(name))["turns"] == 3
    again = (await rig.post(path(child["id"], "fork"), {"at_turn": 0})).json()
    assert again["messages"] == 4


@pytest.mark.parametrize("body", [{"at_turn": 9}, {"at_turn": -1}, {"at_turn": "x"}, [], "[[["])
async def test_a_bad_fork_makes_no_session(body: Any) -> None:
    rig = Rig()
    name, _ = await spoken(rig)
    reply = await rig.post(path(name, "fork"), body)
    assert reply.status_code == 400, reply.text
    assert len(rig.context.directory) == 1
    assert not rig.engine.forked


async def test_fork_and_parent_wait_for_the_same_calls_apart() -> None:
    s = await waiting()
    await s.give(0, "rain")
    child = (await s.rig.post(path(s.id, "fork"), {})).json()
    assert child["state"] == "WAITING_TOOL"
    assert child["pending_tool_calls"] == s.calls
    assert s.rig.engine.parked[-1] == (s.rig.engine.forked[0][1], 0, True)
    assert s.rig.engine.tools[-1] == ("weather", "now")
    other = Waiting(s.rig, {"session_id": child["id"], "choices": [{"message": s.message}]})
    s.rig.engine.reply = say("Child.")
    went = await other.post([{"call_id": call, "content": "snow"} for call in s.calls])
    assert went.json()["session_id"] == child["id"]
    assert "snow" in s.last_prompt()
    view = await s.rig.session(s.id)
    assert view["state"] == "WAITING_TOOL"
    assert [call["result_taken"] for call in view["pending_tool_calls"]] == [True, False]
    assert (await s.give(1, "noon")).json()["session_id"] == s.id
    assert "snow" not in s.last_prompt()
    for name in (s.id, child["id"]):
        await s.rig.client.delete(f"/agentserve/sessions/{name}")
    assert len(s.rig.context.directory) == 0
    assert s.rig.context.chronicle.transcripts.size_bytes == 0


async def test_chat_results_without_a_name_go_to_the_one_that_made_the_calls() -> None:
    s = await waiting()
    child = (await s.rig.post(path(s.id, "fork"), {})).json()
    history = [user("Weather?"), s.message]
    history += [{"role": "tool", "tool_call_id": call, "content": "x"} for call in s.calls]
    assert (await s.rig.chat(history, tools=TOOLS))["session_id"] == s.id
    assert (await s.rig.chat(history, tools=TOOLS, session_id=child["id"]))["session_id"] == child["id"]
    assert (await s.rig.session(s.id))["turns"] == 2


async def test_nobody_gets_into_a_fork_without_its_name() -> None:
    """A client that knows nothing of the fork goes on where it was, also while that is busy."""
    rig = Rig()
    name, messages = await spoken(rig)
    child = (await rig.post(path(name, "fork"), {})).json()
    rig.engine.reply = held = say("Slow.", hold_at=0)
    turn = asyncio.create_task(rig.chat([*messages, user("four")]))
    await settled(lambda: rig.engine.live)
    rig.engine.reply = say("Beside.")
    beside = await rig.chat([*messages, user("five")])
    held.release.set()
    assert (await turn)["session_id"] == name
    assert beside["session_id"] not in (name, child["id"])
    assert (await rig.session(child["id"]))["messages"] == 6
    rig.engine.reply = held = say("Slow.", hold_at=0)
    turn = asyncio.create_task(rig.chat([*messages, user("six")], session_id=child["id"]))
    await settled(lambda: rig.engine.live)
    rig.engine.reply = say("Beside.")
    beside = await rig.chat([*messages, user("seven")], session_id=child["id"])
    held.release.set()
    assert (await turn)["session_id"] == child["id"]
    assert beside["session_id"] not in (name, child["id"])
    assert (await rig.session(name))["turns"] == 4
    rig.check_rest()


async def test_a_fork_at_a_turn_that_made_calls_waits_for_them() -> None:
    s = await waiting()
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    child = (await s.rig.post(path(s.id, "fork"), {"at_turn": 1})).json()
    assert (child["state"], child["pending_tool_calls"]) == ("WAITING_TOOL", s.calls)
    s.rig.engine.reply = say("Other.")
    reply = await s.rig.post(
        path(child["id"], "tool_results"), [{"call_id": call, "content": "y"} for call in s.calls]
    )
    assert reply.json()["choices"][0]["message"]["content"] == "Other."
    s.rig.check_rest()


async def test_a_fork_of_a_reply_that_was_cut_waits_for_nothing_and_outlives_its_parent() -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}") + hermes("now", "{")[:-15])))
    first = await rig.chat([user("a")], tools=TOOLS, max_tokens=1000)
    message = first["choices"][0]["message"]
    assert len(message["tool_calls"]) == 2
    name = first["session_id"]
    for _ in range(2):
        name = (await rig.post(path(name, "fork"), b"")).json()["id"]
        shown = await rig.session(name)
        assert (shown["state"], shown["pending_tool_calls"]) == ("IDLE", [])
        reply = await rig.post(
            path(name, "tool_results"), {"call_id": message["tool_calls"][0]["id"], "content": "x"}
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "incomplete_tool_call")
    assert (await rig.client.delete(f"/agentserve/sessions/{first['session_id']}")).status_code < 300
    rig.engine.reply = say("ok")
    went = await rig.chat([user("a"), message, user("b")], tools=TOOLS, session_id=name)
    assert went["session_id"] == name
    rig.check_rest()


async def test_a_session_without_a_turn_cannot_be_forked() -> None:
    rig = Rig(ScriptedEngine(say("Slow.", hold_at=0)))
    turn = asyncio.create_task(rig.chat([user("a")], session_id="new"))
    await settled(lambda: rig.engine.live)
    reply = await rig.post(path("new", "fork"), {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "nothing_to_fork")
    rig.engine.reply.release.set()  # type: ignore[union-attr]
    await turn
