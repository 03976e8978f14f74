"""What a worker is told of its sessions: hints as long as they hold, and that nobody is expected back."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest

from agentserve.clock import VirtualClock
from agentserve.messages import Decided, Decisions, Devalue, Hint
from agentserve.server.http import app, said
from agentserve.types import FinishReason, SessionId
from tests.api_rig import CHAT, TOOLS, Rig, hermes, served, settled, user
from tests.fakes import ScriptedEngine, say
from tests.unit.test_server_disconnect import send
from tests.waiting_sessions import followed, path, waiting
from tiering.policy.base import Departure, Hints, Residency, Span


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def hint(rig: Rig, name: str, **fields: Any) -> dict[str, Any]:
    reply = await rig.post(path(name, "hints"), fields)
    assert reply.status_code == 200, reply.text
    return {field: receipt["status"] for field, receipt in reply.json()["receipts"].items()}


# --- hints ------------------------------------------------------------------------------------


async def test_what_lasts_is_in_every_park_until_it_is_taken_back() -> None:
    clock = VirtualClock()
    s = await waiting(Rig(ScriptedEngine(), clock=clock))
    engine, now = s.rig.engine, clock.now()
    ranges = [{"start": 0, "end": 64, "priority": 100}]
    said = {"priority": 1, "retain": ranges, "expected_wait": 30, "deadline": 60}
    assert await hint(s.rig, s.id, **said) == dict.fromkeys(said, "accepted")
    spans = (Span(0, 64, 100),)
    key = engine.submits[0].session
    assert engine.news == [Hint(key, Hints(30.0, now + 60.0, 1, retain=spans))]
    clock.advance_to(now + 10)
    assert await hint(s.rig, s.id, priority=2) == {"priority": "accepted"}
    assert engine.news[-1] == Hint(key, Hints(None, now + 60.0, 2, retain=spans))  # a wait is heard of once
    engine.reply = say(hermes("now", "{}"))
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    assert engine.hints[-1] == Hints(priority=2, retain=spans)  # the wait that was spoken of is over
    assert await hint(s.rig, s.id, retain=None) == {"retain": "accepted"}
    view = await s.rig.session(s.id)
    assert view["hints"]["priority"] == 2
    engine.reply = say("Done.")
    await s.rig.post(s.path, [{"call_id": view["pending_tool_calls"][0]["id"], "content": "y"}])
    assert engine.hints[-1] == Hints(priority=2)
    assert (engine.tools[-1], engine.parked[-1][2]) == ((), False)


async def test_what_is_said_while_a_turn_runs_is_deferred_to_its_end() -> None:
    clock = VirtualClock()
    rig = Rig(ScriptedEngine(), clock=clock)
    rig.engine.reply = held = say(hermes("now", "{}"), hold_at=3)
    turn = asyncio.create_task(rig.chat([user("a")], session_id="mine", tools=TOOLS))
    await settled(lambda: rig.engine.live)
    said = {"expected_wait": 7, "priority": 5, "retain": 0.5, "final": False}
    statuses = await hint(rig, "mine", **said)
    assert statuses == dict.fromkeys(said, "deferred") | {"priority": "clipped"}
    assert rig.engine.news == []  # its park says it
    clock.advance_to(clock.now() + 20)
    held.release.set()
    await turn
    assert rig.engine.hints == [Hints(expected_wait=7.0, priority=2, retain=0.5)]


async def test_a_rolled_back_turn_parks_its_session_with_what_is_left_of_the_wait() -> None:
    clock = VirtualClock()
    s = await waiting(Rig(ScriptedEngine(), clock=clock))
    await hint(s.rig, s.id, expected_wait=30)
    clock.advance_to(clock.now() + 10)
    s.rig.engine.reply = say("no", reason=FinishReason.ERROR, error="broken")
    reply = await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    assert reply.status_code == 500
    assert s.rig.engine.parked[-1][2] is True
    assert s.rig.engine.tools[-1] == ("weather", "now")
    assert s.rig.engine.hints[-1] == Hints(expected_wait=20.0)
    assert not [news for news in s.rig.engine.news if isinstance(news, Devalue)]


async def test_a_turn_that_never_reached_the_worker_parks_its_session_by_the_one_that_did() -> None:
    """The worker ignores a park by a turn that it does not know: what was said meanwhile would be lost."""
    s = await waiting()
    await hint(s.rig, s.id, priority=1)
    key, first = s.rig.engine.submits[0].session, s.rig.engine.submits[0].turn
    s.rig.engine.parked.clear()
    huge = "x" * s.rig.engine.hello.max_model_len
    reply = await s.post([{"call_id": call, "content": huge} for call in s.calls])
    assert reply.status_code == 400, reply.text
    assert len(s.rig.engine.submits) == 1
    assert (key, first, True) in s.rig.engine.parked
    assert s.rig.engine.hints[-1] == Hints(priority=1)


async def test_where_the_worker_is_gone_what_lasts_is_deferred_and_in_the_next_park() -> None:
    s = await waiting()
    s.rig.engine.lost.add(s.rig.engine.submits[0].session)
    assert await hint(s.rig, s.id, priority=1, retain=[{"start": 0, "priority": 7}]) == {
        "priority": "deferred",
        "retain": "deferred",
    }
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    assert s.rig.engine.hints[-1] == Hints(priority=1, retain=(Span(0, None, 7),))


# --- nobody is expected back ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_mid_turn_abandons_its_session(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("one")))
    await rig.chat([user("a")], session_id="mine")
    rig.engine.reply = say("two two", hold_at=3)
    body = {
        "model": "tiny",
        "messages": [user("a"), answer("one"), user("b")],
        "session_id": "mine",
        "stream": stream,
    }
    rig.engine.order.clear()
    async with served(rig.app) as base:
        _, writer = await send(base, CHAT, body)
        await settled(lambda: len(rig.engine.submits) == 2)
        writer.close()
        await settled(lambda: rig.engine.news)
    key = rig.engine.submits[0].session
    assert rig.engine.news == [Devalue(key, Departure.ABANDONED)]
    assert rig.engine.order == ["abort", "park", "devalue"]  # a park after it would make it worth something
    assert rig.engine.parked[-1] == (key, 2, False)
    story = await followed(rig, "mine")
    assert [event.data["why"] for event in story if event.kind == "devalued"] == ["abandoned"]


async def test_a_turn_that_fails_abandons_nobody() -> None:
    rig = Rig(ScriptedEngine(say("one")))
    await rig.chat([user("a")], session_id="mine")
    scripts = iter([say("two", hold_at=1), say("no", reason=FinishReason.ERROR, error="broken")])
    rig.engine.reply = lambda command: next(scripts)
    body = {"model": "tiny", "messages": [user("a"), answer("one"), user("b")], "session_id": "mine", "n": 2}
    turn = asyncio.create_task(rig.post(CHAT, body))
    assert (await asyncio.wait_for(turn, 30)).status_code == 500
    assert rig.engine.news == []


async def test_a_wait_without_a_result_ends_by_itself_and_is_abandoned() -> None:
    clock = VirtualClock()
    s = await waiting(Rig(ScriptedEngine(), clock=clock, tool_wait_seconds=100))
    key = s.rig.engine.submits[0].session
    clock.advance_to(clock.now() + 99)
    s.rig.context.end_waits()
    assert s.rig.engine.news == []
    clock.advance_to(clock.now() + 2)
    s.rig.context.end_waits()
    assert s.rig.engine.order[-2:] == ["park", "devalue"]
    assert (s.rig.engine.parked[-1], s.rig.engine.tools[-1]) == ((key, 1, False), ())
    assert s.rig.engine.news == [Devalue(key, Departure.ABANDONED)]
    story = await followed(s.rig, s.id)
    assert [event.kind for event in story][-3:-1] == ["state", "devalued"]


async def test_a_deadline_that_passes_is_seen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.01)
    s = await waiting()
    assert await hint(s.rig, s.id, deadline=0.05) == {"deadline": "accepted"}
    async with served(s.rig.app):  # its lifespan looks at deadlines
        await settled(lambda: len(s.rig.engine.news) > 1)
    assert s.rig.engine.news[-1] == Devalue(s.rig.engine.submits[0].session, Departure.ABANDONED)
    assert (await s.rig.session(s.id))["state"] == "WAITING_TOOL"


async def test_results_by_a_sibling_supersede_and_a_shorter_history_compacts() -> None:
    s = await waiting()
    asked = s.rig.engine.submits[0].session
    other = [user("Weather, please?"), s.message]
    other += [{"role": "tool", "tool_call_id": call, "content": "x"} for call in s.calls]
    reply = await s.rig.chat(other, tools=TOOLS)
    assert reply["session_id"] != s.id
    assert s.rig.engine.news == [Devalue(asked, Departure.SUPERSEDED)]

    rig = Rig(ScriptedEngine(say("A.")))
    system = {"role": "system", "content": "Be brief."}
    await rig.chat([system, user("a")], session_id="mine")
    await rig.chat([system, user("a"), answer("A."), user("b")], session_id="mine")
    await rig.chat([system, user("Before: a, b")], session_id="mine")
    key = rig.engine.submits[0].session
    assert rig.engine.news == [Devalue(key, Departure.COMPACTED)]
    assert (await rig.session("mine"))["devalued"] == "compacted"


async def test_final_finishes_after_the_park_and_can_be_taken_back() -> None:
    rig = Rig(ScriptedEngine(say("one")))
    await rig.chat([user("a")], session_id="mine")
    key = rig.engine.submits[0].session
    assert await hint(rig, "mine", final=True, expected_wait=5) == {
        "final": "accepted",
        "expected_wait": "deferred",
    }
    assert rig.engine.news == [Hint(key, Hints(final=True)), Devalue(key, Departure.FINISHED)]
    assert (await rig.session("mine"))["devalued"] == "finished"
    rig.engine.order.clear()
    assert await hint(rig, "mine", final=False) == {"final": "accepted"}
    assert rig.engine.order == ["park"]  # the policy has forgotten it: it has to hear all of it again
    assert (await rig.session("mine"))["devalued"] is None
    rig.engine.reply = held = say("two", hold_at=1)
    turn = asyncio.create_task(rig.chat([user("a"), answer("one"), user("b")], session_id="mine"))
    await settled(lambda: rig.engine.live)
    assert await hint(rig, "mine", final=True) == {"final": "deferred"}
    rig.engine.order.clear()
    held.release.set()
    await turn
    assert rig.engine.order == ["park", "devalue"]
    assert rig.engine.hints[-1].final


async def test_a_client_that_speaks_again_is_expected_again() -> None:
    clock = VirtualClock()
    s = await waiting(Rig(ScriptedEngine(), clock=clock, tool_wait_seconds=100))
    await hint(s.rig, s.id, deadline=10)
    clock.advance_to(clock.now() + 20)
    s.rig.context.end_waits()
    assert s.rig.engine.news[-1].why is Departure.ABANDONED  # type: ignore[union-attr]
    await hint(s.rig, s.id, expected_wait=5)
    assert s.rig.engine.order[-2:] == ["devalue", "park"]
    assert s.rig.engine.hints[-1] == Hints(expected_wait=5.0)
    assert s.rig.engine.tools[-1] == ("weather", "now")
    s.rig.context.end_waits()
    assert s.rig.engine.order[-1] == "park"


@pytest.mark.parametrize("upload", [False, True])
async def test_whose_results_come_after_all_is_expected_again(upload: bool) -> None:
    clock = VirtualClock()
    s = await waiting(Rig(ScriptedEngine(), clock=clock))
    await hint(s.rig, s.id, deadline=10)
    clock.advance_to(clock.now() + 20)
    s.rig.context.end_waits()
    if upload:
        await s.rig.client.post(f"{s.path}/{s.calls[0]}/stream", content=b"rain")
        assert s.rig.engine.order[-3:] == ["park", "toolsignal", "toolsignal"]
    else:
        await s.give(0, "rain")
        assert s.rig.engine.order[-2:] == ["devalue", "park"]
    s.rig.context.end_waits()  # the deadline that has passed says nothing any more
    assert isinstance(s.rig.engine.news[-1], Devalue) is not upload
    assert s.rig.engine.order.count("devalue") == 1
    assert (await s.rig.session(s.id))["devalued"] is None


async def test_decisions_are_events_of_their_session() -> None:
    clock = VirtualClock()
    s = await waiting(Rig(ScriptedEngine(), clock=clock))
    key, hear = s.rig.engine.submits[0].session, s.rig.engine.hear
    assert hear is not None
    where = Residency(device=1, host=2, disk=3, gone=4, copied=1)
    clock.advance_to(clock.now() + 5)
    made = Decided(clock.now(), "host", "a long wait", math.inf, where)
    hear(
        Decisions(
            (
                (key, 0, made),
                (SessionId("nobody"), 0, made),
                (key, 7, msgspec.structs.replace(made, price=0.5)),
            )
        )
    )
    story = [event for event in await followed(s.rig, s.id) if event.kind == "decision"]
    assert [(event.data["untold"], event.data["price"]) for event in story] == [(0, None), (7, 0.5)]
    assert story[0].data["residency"] == msgspec.structs.asdict(where)
    assert (story[0].data["choice"], story[0].data["reason"]) == ("host", "a long wait")
    assert story[0].data["at"] == pytest.approx(s.rig.context.unix(made.at), abs=1e-5)


async def test_a_closed_session_is_told_of_no_more() -> None:
    s = await waiting()
    await s.rig.client.delete(f"/agentserve/sessions/{s.id}")
    s.rig.context.end_waits()
    assert s.rig.engine.news == []
    assert s.rig.engine.closed == [s.rig.engine.submits[0].session]


async def test_a_request_whose_advice_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(ScriptedEngine(say("Hello!")))
    await rig.chat([user("a")], session_id="mine")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room for a word")

    monkeypatch.setattr(said, "advise", broken)
    history = [user("a"), answer("Hello!"), user("b")]
    body = {"messages": history, "session_id": "mine", "nvext": {"agent_hints": {"priority": 1}}}
    assert (await rig.post(CHAT, body)).status_code == 500
    assert len(rig.engine.submits) == 1
    rig.check_rest()
    monkeypatch.undo()
    assert (await rig.chat(history, session_id="mine"))["session_id"] == "mine"
    assert len({submit.session for submit in rig.engine.submits}) == 1
