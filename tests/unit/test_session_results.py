"""Tool results by their own route: bound to call and epoch, taken once, in any order."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentserve.types import FinishReason
from tests.api_rig import TOOLS, Rig, events, hermes, joined, settled, user
from tests.fakes import Script, ScriptedEngine, say
from tests.waiting_sessions import CALLS, waiting


async def test_results_in_any_order_are_read_in_call_order_and_the_turn_goes_on() -> None:
    s = await waiting()
    first = await s.give(1, "noon", epoch=0)
    assert first.status_code == 200
    assert first.json()["results"] == [{"call_id": s.calls[1], "status": "taken"}]
    assert first.json()["outstanding"] == [s.calls[0]]
    assert len(s.rig.engine.submits) == 1
    view = await s.rig.session(s.id)
    assert view["state"] == "WAITING_TOOL"
    assert [call["result_taken"] for call in view["pending_tool_calls"]] == [False, True]
    last = await s.give(0, "rain")
    assert last.status_code == 200, last.text
    body = last.json()
    assert body["object"] == "chat.completion"
    assert body["session_id"] == s.id == last.headers["x-session-id"]
    assert body["choices"][0]["message"]["content"] == "It rains."
    assert body["choices"][0]["finish_reason"] == "stop"
    prompt = s.last_prompt()
    assert 0 < prompt.index("rain") < prompt.index("noon")
    assert (await s.rig.session(s.id))["state"] == "IDLE"
    s.rig.check_rest()


async def test_each_tools_wait_is_counted_when_its_result_comes_and_once() -> None:
    s = await waiting()

    async def counts() -> list[int]:
        lines = (await s.rig.client.get("/metrics")).text.splitlines()
        found = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
        name = "agentserve_tool_wait_seconds_count"
        return [int(found.get(f'{name}{{tool="{tool}"}}', 0)) for tool in ("weather", "now")]

    assert await counts() == [0, 0]
    for _ in range(2):  # the second time it is a repeat
        await s.give(1, "noon")
        assert await counts() == [0, 1]
    await s.give(0, "rain")
    assert await counts() == [1, 1]


async def test_the_turn_is_the_one_that_a_chat_completion_with_the_whole_history_runs() -> None:
    """Token for token and setting for setting, so it does not matter by which way results come."""
    s = await waiting(temperature=0.25, seed=7, max_completion_tokens=400, cache_salt="mine")
    await s.post([{"call_id": s.calls[1], "content": "noon"}, {"call_id": s.calls[0], "content": "rain"}])
    other = await waiting(temperature=0.25, seed=7, max_completion_tokens=400, cache_salt="mine")
    history = [user("Weather?"), other.message]
    for call, content in zip(other.calls, ("rain", "noon"), strict=True):
        history.append({"role": "tool", "tool_call_id": call, "content": content})
    fields = {"temperature": 0.25, "seed": 7, "max_completion_tokens": 400, "cache_salt": "mine"}
    await other.rig.chat(history, tools=TOOLS, **fields)
    ours, theirs = s.rig.engine.submits[-1], other.rig.engine.submits[-1]
    assert ours.tokens == theirs.tokens
    assert ours.sampling == theirs.sampling
    assert (ours.namespace, ours.priority) == (theirs.namespace, theirs.priority)
    assert ours.turn == theirs.turn == 2


async def test_streamed_like_a_chat_completion() -> None:
    s = await waiting()
    await s.give(0, "rain")
    reply = await s.give(1, "noon", stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = events(reply.content)
    assert chunks[-1] == "[DONE]"
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks[:-1])
    whole = joined(chunks)
    assert whole["content"] == "It rains."
    assert whole["finish_reason"] == "stop"
    assert whole["usage"]["prompt_tokens"] == len(s.rig.engine.submits[-1].tokens) // 4


async def test_a_session_goes_on_call_after_call() -> None:
    """A forced tool choice holds for the turn it was made for: else no agent would ever end."""
    s = await waiting(tool_choice="required")
    forms = len(s.rig.grammars.asked)
    s.rig.engine.reply = say(hermes("now", "{}"))
    reply = await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    [call] = reply.json()["choices"][0]["message"]["tool_calls"]
    assert len(s.rig.grammars.asked) == forms  # free again
    s.rig.engine.reply = say("Done.")
    reply = await s.post({"call_id": call["id"], "content": "noon", "max_tokens": 3})
    assert reply.json()["choices"][0]["message"]["content"] == "Don"
    view = await s.rig.session(s.id)
    assert (view["turns"], view["messages"], view["state"]) == (3, 7, "IDLE")
    s.rig.check_rest()


async def test_a_repeat_is_taken_for_what_it_is_before_and_after_its_turn() -> None:
    s = await waiting()
    for status in ("taken", "repeated"):
        reply = await s.give(0, "rain", epoch=0)
        assert (reply.status_code, reply.json()["results"][0]["status"]) == (200, status)
    as_parts = await s.give(0, [{"type": "text", "text": "rain"}])
    assert as_parts.json()["results"][0]["status"] == "repeated"
    await s.give(1, "noon")
    again = await s.post(
        [{"call_id": call, "content": c} for call, c in zip(s.calls, ("rain", "noon"), strict=True)]
    )
    assert [result["status"] for result in again.json()["results"]] == ["repeated"] * 2
    assert len(s.rig.engine.submits) == 2
    assert (await s.rig.session(s.id))["turns"] == 2


@pytest.mark.parametrize("answered", [False, True])
async def test_another_result_for_an_answered_call_is_a_conflict(answered: bool) -> None:
    s = await waiting()
    await s.give(0, "rain")
    if answered:
        await s.give(1, "noon")
    reply = await s.give(0, "sun")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "result_conflict")
    if not answered:
        await s.give(1, "noon")
    assert "rain" in s.last_prompt()
    assert "sun" not in s.last_prompt()


async def test_of_many_last_results_one_begins_the_turn() -> None:
    s = await waiting()
    await s.give(0, "rain")
    replies = await asyncio.gather(*(s.give(1, "noon") for _ in range(6)))
    kinds = sorted(reply.json()["object"] for reply in replies)
    assert [reply.status_code for reply in replies] == [200] * 6
    assert kinds == ["agentserve.tool_results"] * 5 + ["chat.completion"]
    assert len(s.rig.engine.submits) == 2
    s.rig.check_rest()


async def test_an_epoch_that_is_over_is_refused_with_the_one_that_is() -> None:
    s = await waiting()
    reply = await s.give(0, "rain", epoch=3)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "stale_epoch")
    assert reply.json()["error"]["epoch"] == 0
    s.rig.engine.reply = Script([], FinishReason.ERROR, "the worker broke")
    reply = await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    assert reply.status_code == 500
    view = await s.rig.session(s.id)
    assert (view["state"], view["epoch"], view["turns"]) == ("WAITING_TOOL", 1, 1)
    s.rig.check_rest()


async def test_results_outlive_a_turn_that_failed_and_a_repeat_begins_it_again() -> None:
    """A retry is not swallowed because its first delivery was taken (class 32)."""
    s = await waiting()
    await s.give(0, "rain")
    s.rig.engine.reply = Script([], FinishReason.ERROR, "the worker broke")
    assert (await s.give(1, "noon")).status_code == 500
    s.rig.engine.reply = say("It rains.")
    reply = await s.give(1, "noon", epoch=0)
    assert reply.json()["choices"][0]["message"]["content"] == "It rains."
    assert s.rig.engine.submits[-1].turn == 3


async def test_after_a_failed_turn_a_result_may_be_another_for_the_new_epoch_only() -> None:
    s = await waiting()
    await s.give(0, "rain")
    s.rig.engine.reply = Script([], FinishReason.REFUSED, "too long")
    assert (await s.give(1, "long")).status_code == 400
    s.rig.engine.reply = say("Short.")
    assert (await s.give(1, "short")).json()["error"]["code"] == "result_conflict"
    assert (await s.give(1, "short", epoch=0)).json()["error"]["code"] == "result_conflict"
    reply = await s.give(1, "short", epoch=1)
    assert reply.json()["choices"][0]["message"]["content"] == "Short."
    assert "long" not in s.last_prompt()


async def test_an_error_before_the_turn_takes_nothing() -> None:
    s = await waiting()
    await s.give(0, "rain")
    reply = await s.give(1, "x" * 5000)  # the context has 4096
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    view = await s.rig.session(s.id)
    assert [call["result_taken"] for call in view["pending_tool_calls"]] == [True, False]
    assert (await s.give(1, "noon")).json()["object"] == "chat.completion"


async def test_unknown_calls_and_sessions_are_404() -> None:
    s = await waiting()
    reply = await s.post({"call_id": "call_nobody", "content": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_tool_call")
    mixed = await s.post(
        [{"call_id": s.calls[0], "content": "x"}, {"call_id": "call_nobody", "content": "x"}]
    )
    assert mixed.status_code == 404
    assert not any(call["result_taken"] for call in (await s.rig.session(s.id))["pending_tool_calls"])
    await s.rig.client.delete(f"/agentserve/sessions/{s.id}")
    reply = await s.give(0, "rain")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_not_found")
    assert len(s.rig.context.chronicle.transcripts) == 0


async def test_going_on_without_results_says_so_to_the_model_and_is_final() -> None:
    s = await waiting()
    await s.give(1, "noon")
    reply = await s.post({"continue": True})
    assert reply.json()["choices"][0]["message"]["content"] == "It rains."
    assert "the call was cancelled" in s.last_prompt()
    late = await s.give(0, "rain")
    assert (late.status_code, late.json()["error"]["code"]) == (409, "result_conflict")
    again = await s.post({"continue": True})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "nothing_pending")


async def test_what_was_made_up_for_a_turn_that_failed_may_still_come() -> None:
    s = await waiting()
    s.rig.engine.reply = Script([], FinishReason.ERROR, "the worker broke")
    assert (await s.post({"continue": True})).status_code == 500
    s.rig.engine.reply = say("It rains.")
    assert (await s.give(0, "rain")).json()["outstanding"] == [s.calls[1]]
    assert (await s.give(1, "noon")).json()["object"] == "chat.completion"
    assert "cancelled" not in s.last_prompt()


async def test_a_session_whose_messages_were_dropped_goes_on_by_chat_only() -> None:
    s = await waiting()
    key = s.rig.engine.submits[0].session
    s.rig.context.chronicle.transcripts.forget(key)
    for body in ({"call_id": s.calls[0], "content": "rain"}, {"continue": True}):
        reply = await s.post(body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "messages_not_kept")
    history = [user("Weather?"), s.message]
    history += [{"role": "tool", "tool_call_id": call, "content": "x"} for call in s.calls]
    assert (await s.rig.chat(history, tools=TOOLS))["session_id"] == s.id


async def test_each_choice_of_a_request_goes_its_own_way() -> None:
    rig = Rig(ScriptedEngine(say(CALLS)))
    reply = await rig.chat([user("Weather?")], tools=TOOLS, n=2)
    rig.engine.reply = say("It rains.")
    for choice in reply["choices"]:
        name = choice.get("session_id", reply["session_id"])
        results = [{"call_id": call["id"], "content": name} for call in choice["message"]["tool_calls"]]
        went_on = await rig.post(f"/agentserve/sessions/{name}/tool_results", results)
        assert went_on.json()["session_id"] == name
    assert [submit.turn for submit in rig.engine.submits] == [1, 1, 2, 2]
    rig.check_rest()


async def test_a_turn_goes_on_when_the_one_who_began_it_leaves() -> None:
    s = await waiting()
    s.rig.engine.reply = held = say("It rains.", hold_at=3)
    turn = asyncio.create_task(s.post([{"call_id": call, "content": "x"} for call in s.calls]))
    await settled(lambda: s.rig.engine.live)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert len(s.rig.context.background) == 1
    held.release.set()
    await settled(lambda: not s.rig.context.background)
    view = await s.rig.session(s.id)
    assert (view["turns"], view["state"]) == (2, "IDLE")
    assert (
        json.loads(s.rig.context.chronicle.transcripts.get(s.rig.engine.submits[0].session).messages)[-1][
            "content"
        ]
        == "It rains."
    )
    s.rig.check_rest()


async def test_closing_a_session_ends_its_turn_and_leaves_nothing() -> None:
    s = await waiting()
    s.rig.engine.reply = say("It rains.", hold_at=3)
    turn = asyncio.create_task(s.post([{"call_id": call, "content": "x"} for call in s.calls]))
    await settled(lambda: s.rig.engine.live)
    assert (await s.rig.client.delete(f"/agentserve/sessions/{s.id}")).status_code == 200
    reply = await turn
    assert reply.status_code == 409, reply.text
    chronicle = s.rig.context.chronicle
    assert (len(chronicle.transcripts), len(chronicle.events), len(s.rig.context.background)) == (0, 0, 0)
    assert chronicle.transcripts.size_bytes == chronicle.events.size_bytes == 0
    s.rig.check_rest()


async def test_the_server_leaves_and_what_runs_without_a_reader_is_rolled_back() -> None:
    s = await waiting()
    s.rig.engine.reply = say("It rains.", hold_at=3)
    turn = asyncio.create_task(s.post([{"call_id": call, "content": "x"} for call in s.calls]))
    await settled(lambda: s.rig.engine.live)
    await s.rig.context.background.stop()
    await asyncio.gather(turn, return_exceptions=True)
    view = await s.rig.session(s.id)
    assert (view["state"], view["epoch"]) == ("WAITING_TOOL", 1)
    s.rig.check_rest()


async def test_the_worker_hears_which_tools_are_waited_for() -> None:
    s = await waiting()
    assert s.rig.engine.tools[-1] == ("weather", "now")
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    assert s.rig.engine.tools[-1] == ()
