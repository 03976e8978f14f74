"""Results by their own route beside chat completions of the same session: who wins, and what is left."""

from __future__ import annotations

import asyncio
import threading

from tests.api_rig import TOOLS, settled, user
from tests.fakes import say
from tests.waiting_sessions import waiting


async def test_results_that_a_chat_completion_brought_are_known_here() -> None:
    s = await waiting()
    await s.give(0, "rain")
    history = [user("Weather?"), s.message]
    history += [
        {"role": "tool", "tool_call_id": call, "content": c}
        for call, c in zip(s.calls, ("rain", "noon"), strict=True)
    ]
    reply = await s.rig.chat(history, tools=TOOLS)
    assert reply["session_id"] == s.id
    assert (await s.give(1, "noon")).json()["results"][0]["status"] == "repeated"
    assert (await s.give(1, "midnight")).json()["error"]["code"] == "result_conflict"


async def test_a_result_after_a_sibling_took_them_is_late() -> None:
    s = await waiting()
    history = [user("Weather?"), {**s.message, "content": "edited"}]
    history += [{"role": "tool", "tool_call_id": call, "content": "x"} for call in s.calls]
    sibling = await s.rig.chat(history, tools=TOOLS)
    assert sibling["session_id"] != s.id
    reply = await s.give(0, "rain")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_went_on")


async def test_while_a_chat_turn_runs_results_wait_outside() -> None:
    s = await waiting()
    s.rig.engine.reply = held = say("It rains.", hold_at=0)
    history = [user("Weather?"), s.message]
    history += [{"role": "tool", "tool_call_id": call, "content": "x"} for call in s.calls]
    turn = asyncio.create_task(s.rig.chat(history, tools=TOOLS))
    await settled(lambda: s.rig.engine.live)
    reply = await s.give(0, "x")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "turn_running")
    held.release.set()
    await turn
    assert (await s.give(0, "x")).json()["results"][0]["status"] == "repeated"


async def test_a_chat_turn_beside_ours_becomes_a_sibling() -> None:
    s = await waiting()
    s.rig.engine.reply = held = say("It rains.", hold_at=0)
    turn = asyncio.create_task(s.post([{"call_id": call, "content": "x"} for call in s.calls]))
    await settled(lambda: s.rig.engine.live)
    assert (await s.give(0, "x")).json()["running_turn"] == 2
    assert (await s.give(0, "y")).json()["error"]["code"] == "result_conflict"
    s.rig.engine.reply = say("Beside.")
    history = [user("Weather?"), s.message]
    history += [{"role": "tool", "tool_call_id": call, "content": "x"} for call in s.calls]
    beside = await s.rig.chat(history, tools=TOOLS)
    assert beside["session_id"] != s.id
    held.release.set()
    assert (await turn).json()["choices"][0]["message"]["content"] == "It rains."
    s.rig.check_rest()


async def test_a_chat_turn_that_comes_first_wins_and_ours_leaves_nothing_behind() -> None:
    s = await waiting(parallel_tool_calls=False)  # so the turn needs a grammar, and that takes its time
    compiling, go = threading.Event(), threading.Event()

    def slow(source: object) -> str:
        compiling.set()
        assert go.wait(60)
        return "{}"

    s.rig.grammars.compile = slow  # type: ignore[method-assign]
    ours = asyncio.create_task(s.post([{"call_id": call, "content": "ours"} for call in s.calls]))
    await settled(compiling.is_set)
    history = [user("Weather?"), s.message]
    history += [{"role": "tool", "tool_call_id": call, "content": "theirs"} for call in s.calls]
    assert (await s.rig.chat(history))["session_id"] == s.id
    go.set()
    reply = await ours
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_went_on")
    assert (await s.give(0, "theirs")).json()["results"][0]["status"] == "repeated"
    assert (await s.give(0, "ours")).json()["error"]["code"] == "result_conflict"
    assert (await s.rig.session(s.id))["epoch"] == 0
    s.rig.check_rest()
