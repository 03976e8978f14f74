"""Sessions as clients see them: what is shown, closing, turns that fail, waits that end, a full directory."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import msgspec

from agentserve.messages import SessionView
from agentserve.server.sessions.room import Quota
from agentserve.types import FinishReason, SessionState, TurnId
from tests.api_rig import CHAT, TOOLS, Rig, hermes, settled, user
from tests.fakes import ByteTemplate, ScriptedEngine, say
from tiering.policy.base import Residency


def assistant(reply: dict[str, Any]) -> dict[str, Any]:
    message = reply["choices"][0]["message"]
    return {key: value for key, value in message.items() if key in ("role", "content", "tool_calls")}


async def test_list_show_and_delete() -> None:
    rig = Rig()
    await rig.chat([user("a")], session_id="one")
    await rig.chat([user("b")], session_id="two")
    listed = (await rig.client.get("/agentserve/sessions")).json()
    assert [session["id"] for session in listed["data"]] == ["two", "one"]
    limited = (await rig.client.get("/agentserve/sessions?limit=1")).json()
    assert ([session["id"] for session in limited["data"]], limited["has_more"]) == (["two"], True)
    assert (await rig.client.get("/agentserve/sessions?limit=x")).status_code == 400
    gone = await rig.client.delete("/agentserve/sessions/one")
    assert gone.json()["deleted"] is True
    assert rig.engine.closed == [rig.engine.submits[0].session]
    for method in ("GET", "DELETE"):
        reply = await rig.client.request(method, "/agentserve/sessions/one")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_not_found")


async def test_where_kv_is_and_why() -> None:
    rig = Rig()
    await rig.chat([user("a")], session_id="one")
    await rig.chat([user("b")], session_id="two")
    at, zero = rig.context.clock_at_start, rig.context.started
    name = rig.engine.submits[0].session
    view = SessionView(
        name, SessionState.IDLE, TurnId(1), 70, 64, 4, 0,
        residency=Residency(device=1, host=2, disk=0, gone=1, copied=1), rested=at + 1.0, tools=("grep",),
        decision="host", reason="a long wait", price=0.25, until=at + 9.0,
    )  # fmt: skip
    rig.engine.views[name] = view
    expected = {
        "residency": {"device": 1, "host": 2, "disk": 0, "gone": 1, "copied": 1},
        "decision": {"choice": "host", "reason": "a long wait", "price": 0.25, "until": round(zero + 9.0, 6)},
        "rested_at": round(zero + 1.0, 6),
        "waiting_for": ["grep"],
    }
    nothing = {"residency": None, "decision": None, "rested_at": None, "waiting_for": []}
    assert (await rig.session("one")).items() >= expected.items()
    assert (await rig.session("two")).items() >= nothing.items(), "there are no tiers"
    listed = (await rig.client.get("/agentserve/sessions?detail=true")).json()["data"]
    assert [shown["id"] for shown in listed] == ["two", "one"]
    assert listed[0].items() >= nothing.items()
    assert listed[1].items() >= expected.items()
    assert "residency" not in (await rig.client.get("/agentserve/sessions")).json()["data"][0], (
        "not asked for"
    )
    for_good = msgspec.structs.replace(view, until=math.inf)
    rig.engine.views[name] = for_good
    assert (await rig.session("one"))["decision"]["until"] is None
    for query in ("detail=yes", "detail=true&limit=201"):
        assert (await rig.client.get(f"/agentserve/sessions?{query}")).status_code == 400


async def test_deleting_a_session_ends_its_running_turn() -> None:
    script = say("abc", hold_at=1)
    rig = Rig(ScriptedEngine(script))
    task = asyncio.create_task(rig.post(CHAT, {"messages": [user("a")], "session_id": "one"}))
    await settled(lambda: rig.engine.live)
    assert (await rig.client.delete("/agentserve/sessions/one")).status_code == 200
    reply = await task
    assert reply.status_code == 409
    rig.check_rest()


async def test_a_template_error_rolls_the_session_back() -> None:
    rig = Rig()
    reply = await rig.post(CHAT, {"messages": [user("BREAK")], "session_id": "one"})
    assert reply.status_code == 400
    assert "messages[0]" in reply.json()["error"]["message"]
    assert len(rig.context.directory) == 0


async def test_an_evicted_session_is_closed_on_the_engine() -> None:
    rig = Rig()
    rig.context.directory._room._all = Quota(sessions=2)
    for text in "abc":
        await rig.chat([user(text)])
    assert rig.engine.closed == [rig.engine.submits[0].session]


async def test_every_choice_can_be_continued() -> None:
    texts = iter(["one", "two", "three", "four"])
    rig = Rig(ScriptedEngine(lambda submit: say(next(texts))))
    first = await rig.chat([user("a")], n=2)
    second = first["choices"][1]
    reply = await rig.chat(
        [user("a"), {"role": "assistant", "content": second["message"]["content"]}, user("b")],
        session_id=first["session_id"],
    )
    assert reply["session_id"] == second["session_id"]
    assert json.dumps(reply)


async def test_a_session_closed_before_its_turn_begins_is_not_opened_again() -> None:
    """A Submit behind the Close would open it on the worker for good."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(ByteTemplate):
        def render(self, *args: Any, **kwargs: Any) -> Any:
            entered.set()
            leave.wait(10)
            return super().render(*args, **kwargs)

    rig = Rig(template=Slow())
    task = asyncio.create_task(rig.post(CHAT, {"messages": [user("a")], "session_id": "one"}))
    await settled(entered.is_set)
    assert (await rig.client.delete("/agentserve/sessions/one")).status_code == 200
    leave.set()
    reply = await task
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_closed")
    assert rig.engine.submits == rig.engine.forked == []
    rig.check_rest()


async def test_a_turn_of_a_session_that_vanished_leaves_nothing_on_the_engine() -> None:
    script = say("abc", hold_at=1)
    rig = Rig(ScriptedEngine(script))
    task = asyncio.create_task(rig.post(CHAT, {"messages": [user("a")], "session_id": "one"}))
    await settled(lambda: rig.engine.live)
    session = rig.context.directory.get("default", "one")
    assert session is not None
    rig.context.directory.close(session)
    script.release.set()
    assert (await task).status_code == 409
    assert rig.engine.closed == [session.key]


async def asked_for_a_tool(rig: Rig) -> tuple[str, list[dict[str, Any]]]:
    """A session that waits; its name and the messages that answer it."""
    rig.engine.reply = say(hermes("now", "{}"))
    first = await rig.chat([user("a")], tools=TOOLS)
    [call] = first["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "noon"}
    return first["session_id"], [user("a"), assistant(first), result]


async def test_a_failed_turn_on_a_tool_result_waits_again_on_the_engine_too() -> None:
    rig = Rig()
    name, messages = await asked_for_a_tool(rig)
    rig.engine.reply = say("half", reason=FinishReason.ERROR, error="no")
    reply = await rig.post(CHAT, {"messages": messages, "tools": TOOLS})
    assert reply.status_code == 500
    assert (await rig.session(name))["state"] == "WAITING_TOOL"
    key = rig.engine.submits[0].session
    assert rig.engine.parked == [(key, 1, True), (key, 2, True)]
    rig.engine.reply = say("It is noon.")
    again = await rig.chat(messages, tools=TOOLS)
    assert again["session_id"] == name
    assert rig.engine.parked[-1] == (key, 3, False)


async def test_the_engine_is_told_when_a_wait_is_over() -> None:
    rig = Rig(tool_wait_seconds=0.0)
    name, messages = await asked_for_a_tool(rig)
    key = rig.engine.submits[0].session
    assert rig.engine.parked == [(key, 1, True), (key, 1, False)]
    shown = await rig.session(name)
    assert (shown["state"], len(shown["pending_tool_calls"])) == ("IDLE", 1)
    rig.engine.reply = say("noon")
    assert (await rig.chat(messages, tools=TOOLS))["session_id"] == name


async def test_a_full_directory_is_a_503() -> None:
    script = say("abc", hold_at=1)
    rig = Rig(ScriptedEngine(script))
    rig.context.directory._room._all = Quota(sessions=1)
    task = asyncio.create_task(rig.chat([user("a")]))
    await settled(lambda: rig.engine.live)
    reply = await rig.post(CHAT, {"messages": [user("b")]})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    script.release.set()
    await task
