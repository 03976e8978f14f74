"""Sessions as clients see them: names, lineages, tool waits, splicing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import CHAT, TOOLS, Rig, hermes, settled, user
from tests.fakes import END, ScriptedEngine, say


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
    assert reply.status_code == 200, reply.text
    prompt = bytes(t for t in unpack_tokens(rig.engine.submits[2].tokens) if t < 256)
    assert f"assistant\n{CUT}\nuser\nb".encode() in prompt
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
