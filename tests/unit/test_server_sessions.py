"""Sessions as clients see them: names, lineages, tool waits, splicing, closing."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import msgspec
import pytest

from agentserve.messages import SessionView, unpack_tokens
from agentserve.types import FinishReason, SessionState, TurnId
from tests.api_rig import CHAT, TOOLS, Rig, hermes, settled, user
from tests.fakes import END, ByteTemplate, ScriptedEngine, say
from tiering.policy.base import Residency


def assistant(reply: dict[str, Any]) -> dict[str, Any]:
    message = reply["choices"][0]["message"]
    return {key: value for key, value in message.items() if key in ("role", "content", "tool_calls")}


async def test_the_reply_names_its_session() -> None:
    rig = Rig()
    reply = await rig.post(CHAT, {"messages": [user("a")]})
    name = reply.headers["x-session-id"]
    assert reply.json()["session_id"] == name
    assert (await rig.session(name))["state"] == "IDLE"
    streamed = await rig.post(CHAT, {"messages": [user("a")], "stream": True})
    assert streamed.headers["x-session-id"] not in ("", name)


async def test_a_named_session_by_body_and_by_header() -> None:
    rig = Rig()
    reply = await rig.chat([user("a")], headers={"X-Session-ID": "from-header"}, session_id="from.body:1")
    assert reply["session_id"] == "from.body:1"
    reply = await rig.chat([user("a")], headers={"X-Session-ID": "from-header"})
    assert reply["session_id"] == "from-header"
    assert {submit.session for submit in rig.engine.submits}.isdisjoint({"from-header", "from.body:1"})


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a/b", "é", "a\nb"])
async def test_bad_session_names_are_refused(name: str) -> None:
    rig = Rig()
    reply = await rig.post(CHAT, {"messages": [user("a")], "session_id": name})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_session_id"
    rig.check_rest()


async def test_a_conversation_stays_in_its_session_and_keeps_its_ids() -> None:
    """What was generated comes back as the ids it was, though bytes and template might differ."""
    rig = Rig(ScriptedEngine(say("I said so.")))
    messages = [user("a")]
    first = await rig.chat(messages)
    messages += [assistant(first), user("b")]
    second = await rig.chat(messages)
    assert second["session_id"] == first["session_id"]
    one, two = (unpack_tokens(submit.tokens) for submit in rig.engine.submits)
    generated = [*b"I said so."]
    assert list(two[: len(one) + len(generated) + 1]) == [*one, *generated, END]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(one) + len(generated)
    assert [submit.turn for submit in rig.engine.submits] == [1, 2]


async def test_another_salt_never_continues_a_conversation() -> None:
    """Who guesses a history does not get into its session, nor learns that it exists (class 46)."""
    rig = Rig(ScriptedEngine(say("Yes.")))
    first = await rig.chat([user("a")], cache_salt="alice")
    history = [user("a"), assistant(first), user("b")]
    stranger = await rig.chat(history, cache_salt="mallory")
    nobody = await rig.chat(history)
    assert len({reply["session_id"] for reply in (first, stranger, nobody)}) == 3
    assert (await rig.session(first["session_id"]))["turns"] == 1
    own = await rig.chat(history, cache_salt="alice")
    assert own["session_id"] == first["session_id"]


async def test_an_edited_answer_starts_a_sibling_that_reuses_what_is_before_it() -> None:
    rig = Rig(ScriptedEngine(say("original")))
    first = await rig.chat([user("a")])
    edited = [user("a"), {"role": "assistant", "content": "Original"}, user("b")]
    second = await rig.chat(edited, session_id=first["session_id"])
    assert second["session_id"] != first["session_id"]
    shown = await rig.session(second["session_id"])
    assert shown["parent"] == first["session_id"]
    prompt = unpack_tokens(rig.engine.submits[-1].tokens)
    assert bytes(t for t in prompt if t < 256).count(b"Original") == 1
    [(parent, child, length)] = rig.engine.forked
    assert (parent, child) == tuple(submit.session for submit in rig.engine.submits)
    assert length == 0  # nothing that was committed is shared; the KV of the question is found by content


async def test_a_tool_call_round_trip() -> None:
    texts = iter([hermes("weather", '{"city": "Oslo"}') + hermes("now", "{}"), "It rains."])
    rig = Rig(ScriptedEngine(lambda submit: say(next(texts))))
    messages = [user("Weather?")]
    first = await rig.chat(messages, tools=TOOLS)
    name = first["session_id"]
    shown = await rig.session(name)
    assert shown["state"] == "WAITING_TOOL"
    calls = first["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in shown["pending_tool_calls"]] == [call["id"] for call in calls]
    assert [step["state"] for step in shown["history"]] == [
        "WAITING",
        "PREFILLING",
        "DECODING",
        "IDLE",
        "WAITING_TOOL",
    ]
    # results in the other order than the calls
    results = [
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "noon"},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"},
    ]
    messages += [assistant(first), *results]
    second = await rig.chat(messages, tools=TOOLS)
    assert second["session_id"] == name
    one, two = (unpack_tokens(submit.tokens) for submit in rig.engine.submits)
    text = bytes(t for t in two[len(one) :] if t < 256)
    assert text.index(b"rain") < text.index(b"noon")
    computed = second["usage"]["agentserve"]["computed_tokens"]
    assert (
        computed
        == len(two) - second["usage"]["prompt_tokens_details"]["cached_tokens"] + len(b"It rains.") + 1
    )
    shown = await rig.session(name)
    assert (shown["state"], shown["turns"], shown["pending_tool_calls"]) == ("IDLE", 2, [])
    rig.check_rest()


async def test_whole_calls_are_waited_for_also_when_max_tokens_ended_the_turn() -> None:
    text = hermes("now", "{}")
    rig = Rig(ScriptedEngine(say(text + text[:5])))
    first = await rig.chat([user("a")], tools=TOOLS, max_tokens=len(text))
    assert first["choices"][0]["finish_reason"] == "length"
    assert (await rig.session(first["session_id"]))["state"] == "WAITING_TOOL"
    half = say(text + '<tool_call>{"name": "no', eos=False)
    rig.engine.reply = half
    third = await rig.chat([user("c")], tools=TOOLS, max_tokens=len(half.ids))
    assert (await rig.session(third["session_id"]))["state"] == "IDLE"


async def test_equal_histories_of_two_clients_are_told_apart_by_their_call_ids() -> None:
    rig = Rig(ScriptedEngine(lambda submit: say("done" if b"noon" in submit.tokens[::4] else CALL)))
    told = {}
    for name in ("agentA", "agentB"):
        first = assistant(await rig.chat([user("a")], tools=TOOLS, session_id=name))
        [call] = first["tool_calls"]
        told[name] = [user("a"), first, {"role": "tool", "tool_call_id": call["id"], "content": "noon"}]
    await rig.chat(told["agentA"], tools=TOOLS, session_id="agentA")
    again = await rig.chat(told["agentA"], tools=TOOLS)
    assert (await rig.session(again["session_id"]))["parent"] == "agentA"
    assert (await rig.session("agentB"))["state"] == "WAITING_TOOL"
    later = [*told["agentA"], assistant(again), user("more")]
    done = await rig.chat(told["agentB"], tools=TOOLS, session_id="agentB")
    assert assistant(done) == assistant(again)
    for _ in range(2):
        follows = await rig.session((await rig.chat(later, tools=TOOLS))["session_id"])
        assert "agentB" not in (follows["id"], follows["parent"])
    rig.check_rest()


CALL = hermes("now", "{}")
CUT = hermes("weather", '{"city": "Oslo"}').split("slo")[0]


@pytest.mark.parametrize("fields", [{"max_tokens": len(CUT)}, {"stop": "slo"}])
@pytest.mark.parametrize("answered", [False, True])
async def test_a_call_that_was_cut_can_be_sent_back(fields: dict[str, Any], answered: bool) -> None:
    rig = Rig(ScriptedEngine(say(hermes("weather", '{"city": "Oslo"}'))))
    first = await rig.chat([user("a")], tools=TOOLS, **fields)
    told = assistant(first)
    [call] = told["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "O'
    after = {"role": "tool", "tool_call_id": call["id"], "content": "b"} if answered else user("b")
    second = await rig.chat([user("a"), told, after], tools=TOOLS)
    assert second["session_id"] == first["session_id"]
    prompt = bytes(t for t in unpack_tokens(rig.engine.submits[1].tokens) if t < 256)
    assert f"assistant\n{CUT}\nuser\nb".encode() in prompt
    stranger = told | {"tool_calls": [call | {"id": "call_of_somebody"}]}
    reply = await rig.post(CHAT, {"messages": [user("a"), stranger, user("b")], "tools": TOOLS})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
    rig.check_rest()


async def test_whole_calls_before_one_that_was_cut_keep_their_results() -> None:
    rig = Rig(ScriptedEngine(say("Well. " + hermes("now", "{}") + CUT)))
    first = await rig.chat([user("a")], tools=TOOLS)
    told = assistant(first)
    now, cut = told["tool_calls"]
    results = [
        {"role": "tool", "tool_call_id": c["id"], "content": f"r{n}"} for n, c in enumerate((cut, now))
    ]
    second = await rig.chat([user("a"), told, *results], tools=TOOLS)
    assert second["session_id"] == first["session_id"]
    prompt = bytes(t for t in unpack_tokens(rig.engine.submits[1].tokens) if t < 256)
    assert prompt.index(CUT.encode()) < prompt.index(b"tool\nr1") < prompt.index(b"user\nr0")


async def test_the_session_is_found_by_its_call_ids_alone() -> None:
    """A client that rewrote the call's text still gets its lineage, as a sibling."""
    texts = iter([hermes("now", "{}"), "done", "done"])
    rig = Rig(ScriptedEngine(lambda submit: say(next(texts))))
    first = await rig.chat([user("a")], tools=TOOLS)
    [call] = first["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "noon"}
    told = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
    second = await rig.chat([user("a"), told, result], tools=TOOLS)
    assert (await rig.session(second["session_id"]))["parent"] == first["session_id"]


async def test_concurrent_turns_of_one_lineage_become_siblings_both_right() -> None:
    script = say("slow", hold_at=1)
    engine = ScriptedEngine(say("first"))
    rig = Rig(engine)
    first = await rig.chat([user("a")], session_id="one")
    engine.reply = lambda submit: script if len(engine.submits) == 2 else say("fast")
    history = [user("a"), assistant(first)]
    slow = asyncio.create_task(rig.chat([*history, user("b")], session_id="one"))
    await settled(lambda: len(engine.submits) == 2)
    fast = await rig.chat([*history, user("c")], session_id="one")
    script.release.set()
    slow_reply = await slow
    assert slow_reply["session_id"] == "one"
    assert fast["session_id"] != "one"
    assert (await rig.session(fast["session_id"]))["parent"] == "one"
    assert (await rig.session("one"))["turns"] == 2
    assert (await rig.session(fast["session_id"]))["turns"] == 1
    for reply in (slow_reply, fast):
        question = "b" if reply is slow_reply else "c"
        again = await rig.chat([*history, user(question), assistant(reply), user("d")], session_id="one")
        assert again["session_id"] == reply["session_id"]
    rig.check_rest()


async def test_a_stop_string_inside_a_token_keeps_prompt_and_text_equal() -> None:
    """The cut text is what the client saw, so it is what the next prompt says."""
    rig = Rig(ScriptedEngine(say("keep this<STOP>gone")))
    first = await rig.chat([user("a")], stop="<STOP>")
    assert assistant(first)["content"] == "keep this"
    await rig.chat([user("a"), assistant(first), user("b")])
    text = bytes(t for t in unpack_tokens(rig.engine.submits[-1].tokens) if t < 256)
    assert b"keep this" in text
    assert b"STOP" not in text


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
    rig.context.directory._max_sessions = 2
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
    rig.context.directory._max_sessions = 1
    task = asyncio.create_task(rig.chat([user("a")]))
    await settled(lambda: rig.engine.live)
    reply = await rig.post(CHAT, {"messages": [user("b")]})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    script.release.set()
    await task
