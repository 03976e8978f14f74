"""Hints, events and expiry of sessions, on a scripted engine."""

from __future__ import annotations

import json

import pytest

from agentserve.messages import Hint
from agentserve.types import FinishReason
from tests.api_rig import TOOLS, Rig, hermes, user
from tests.fakes import Script, ScriptedEngine, say
from tests.waiting_sessions import followed, path, waiting
from tiering.policy.base import Hints

# --- hints ------------------------------------------------------------------------------------


async def test_hints_reach_the_worker_and_get_receipts() -> None:
    s = await waiting()
    key = s.rig.engine.submits[0].session
    sent = {"expected_wait": 2.5, "priority": 99, "retain": "all", "nonsense\u2028": 1}
    reply = await s.rig.post(path(s.id, "hints"), sent)
    receipts = reply.json()["receipts"]
    assert receipts["expected_wait"] == {"status": "accepted", "value": 2.5, "reason": ""}
    assert (receipts["priority"]["status"], receipts["priority"]["value"]) == ("clipped", 2)
    assert receipts["retain"]["status"] == receipts["nonsense\u2028"]["status"] == "rejected"
    assert s.rig.engine.news == [Hint(key, Hints(expected_wait=2.5, priority=2))]
    story = await followed(s.rig, s.id)
    assert [event.data["receipts"] for event in story if event.kind == "hints"] == [receipts]


@pytest.mark.parametrize("body", ["", "[]", "null", "7", "{", '{"a": NaN}', "[" * 1000])
async def test_bad_hints_are_a_400(body: str) -> None:
    s = await waiting()
    assert (await s.rig.post(path(s.id, "hints"), body)).status_code == 400
    assert s.rig.engine.news == []


async def test_a_flood_of_hints_gets_a_bounded_answer() -> None:
    s = await waiting()
    reply = await s.rig.post(path(s.id, "hints"), {f"{i:0100}": -1e308 for i in range(5000)})
    assert reply.status_code == 200
    assert len(reply.content) < 10_000
    assert s.rig.engine.news == []  # what is rejected is as if it had not been said


# --- events -----------------------------------------------------------------------------------


async def test_events_tell_the_whole_story_whichever_way_its_turns_came() -> None:
    s = await waiting()
    await s.give(1, "noon")
    await s.give(0, "rain")
    story = await followed(s.rig, s.id)
    kinds = [event.kind for event in story]
    assert [event.number for event in story] == list(range(1, len(story) + 1))
    calls = [event.data for event in story if event.kind == "tool_call"]
    assert [(call["call_id"], call["name"], call["epoch"]) for call in calls] == [
        (s.calls[0], "weather", 0),
        (s.calls[1], "now", 0),
    ]
    states = [event.data["state"] for event in story if event.kind == "state"]
    assert states[-1] == "IDLE"
    assert "WAITING_TOOL" in states
    for turn, text in ((1, ""), (2, "It rains.")):
        deltas = [event.data for event in story if event.kind == "delta" and event.data["turn"] == turn]
        assert "".join(delta.get("content", "") for delta in deltas) == text
    pieces = [piece for event in story if event.kind == "delta" for piece in event.data.get("tool_calls", ())]
    for index, call in enumerate(calls):
        joined = "".join(piece["arguments"] for piece in pieces if piece["index"] == index)
        assert joined == call["arguments"]
    results = [event.data for event in story if event.kind == "tool_result"]
    assert [result["call_id"] for result in results] == [s.calls[1], s.calls[0]]
    assert kinds.count("turn_started") == kinds.count("turn_completed") == 2
    assert kinds.index("turn_started") < kinds.index("delta") < kinds.index("turn_completed")
    assert kinds[-1] == "closed"


async def test_a_server_that_did_not_see_the_beginning_says_so() -> None:
    s = await waiting()
    s.rig.context.chronicle.events.forget(s.rig.engine.submits[0].session)  # as after a restart
    story = await followed(s.rig, s.id)
    assert [event.kind for event in story] == ["gap", "closed"]
    assert story[0].data["lost"] is None


async def test_of_a_session_with_one_turn_nothing_is_missing() -> None:
    s = await waiting()
    fork = (await s.rig.post(path(s.id, "fork"), {})).json()["id"]
    assert (await followed(s.rig, fork))[0].kind == "forked_from"
    assert (await followed(s.rig, s.id))[0].number == 1


async def test_a_rolled_back_turn_is_told_and_so_is_its_epoch() -> None:
    s = await waiting()
    s.rig.engine.reply = Script(list(b"It"), FinishReason.ERROR, "the worker broke")
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    story = await followed(s.rig, s.id)
    [undone] = [event.data for event in story if event.kind == "turn_rolled_back"]
    assert undone == {"turn": 2, "epoch": 1, "reason": "the worker broke"}
    after = [event.data["state"] for event in story if event.kind == "state"]
    assert after[-1] == "WAITING_TOOL"


async def test_a_stream_is_taken_up_after_the_last_event() -> None:
    s = await waiting()
    name = s.rig.context.chronicle.events.of(s.rig.engine.submits[0].session).name
    story = await followed(s.rig, s.id, f"?after={name}-3", **{"last-event-id": f"{name}-5"})
    assert story[0].number == 6


@pytest.mark.parametrize("after", ["x", "-1", "1-", "1-1-1", "é", "1" * 200])
async def test_a_bad_event_id_is_a_400(after: str) -> None:
    s = await waiting()
    reply = await s.rig.client.get(path(s.id, "events"), params={"after": after})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_event_id")


async def test_a_turn_that_nobody_reads_costs_no_more_than_the_bound() -> None:
    s = await waiting()
    log = s.rig.context.chronicle.events.of(s.rig.engine.submits[0].session)
    s.rig.engine.reply = say("x" * 3000)
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    assert log.size_bytes <= 256 << 10
    assert log.last > 3000
    assert log.first > 1


# --- expiry -----------------------------------------------------------------------------------


class Clock:
    time = 1000.0

    def now(self) -> float:
        return self.time


async def test_idle_sessions_expire_and_waiting_ones_do_not() -> None:
    clock = Clock()
    engine = ScriptedEngine()
    rig = Rig(engine, clock=clock, session_ttl_seconds=60.0, tool_wait_seconds=600.0)
    idle = (await rig.chat([user("a")]))["session_id"]
    engine.reply = say(hermes("now", "{}"))
    asking = (await rig.chat([user("b")], tools=TOOLS))["session_id"]
    clock.time += 59
    await rig.session(idle)
    clock.time += 2
    assert (await rig.client.get(f"/agentserve/sessions/{idle}")).status_code == 404
    assert engine.closed == [engine.submits[0].session]
    assert (await rig.session(asking))["state"] == "WAITING_TOOL"
    clock.time += 600
    listed = json.loads((await rig.client.get("/agentserve/sessions")).content)
    assert listed["data"] == []
    assert len(rig.context.chronicle.transcripts) == len(rig.context.chronicle.events) == 0
