"""Prompts of Messages without a turn: counted, and computed ahead."""

from __future__ import annotations

from typing import Any

from agentserve.messages import unpack_tokens
from tests.api_rig import Rig, user
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import CALL, COUNT, MESSAGES, TOOL, ask, minimal, refusal, usage_before


async def test_counts_are_those_of_the_prompt() -> None:
    rig = Rig(ScriptedEngine(say("Hi there. " + CALL)))
    fields = {"system": "Be brief.", "tools": [TOOL], "thinking": {"type": "disabled"}}
    history: list[Any] = [user("Oslo?")]
    for turn in range(2):
        count = await rig.post(COUNT, {"model": "tiny", "messages": history, **fields})
        assert count.status_code == 200, count.text
        assert count.headers["request-id"]
        message = await ask(rig, *history, **fields)
        size = len(unpack_tokens(rig.engine.submits[turn].tokens))
        assert count.json() == {"input_tokens": size}
        assert usage_before(message) == size
        history.append({"role": "assistant", "content": message["content"]})
        call = message["content"][1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
        history.append({"role": "user", "content": [result]})
        rig.engine.reply = say("It rains. " + CALL)
    rig.check_rest()
    assert await refusal(rig, {"model": "no", "messages": [user("a")]}, COUNT) == (
        404,
        "not_found_error",
        "The model 'no' does not exist; this server has 'tiny'.",
    )


async def test_counts_take_the_ids_that_were_generated() -> None:
    """Ids that no encoder would give for their text still count as they are in the prompt."""
    rig = Rig(ScriptedEngine(say("ab")))
    await ask(rig, user("x"), session_id="s")
    [session] = rig.context.directory.sessions("default")
    session.replies[1].extend([97] * 5)  # as if its tokens were shorter than the text's
    history = [user("x"), {"role": "assistant", "content": "ab"}, user("y")]
    count = (await rig.post(COUNT, minimal(messages=history))).json()["input_tokens"]
    await ask(rig, *history)
    assert count == len(unpack_tokens(rig.engine.submits[-1].tokens))
    named = (await rig.post(COUNT, minimal(messages=history, session_id="other"))).json()["input_tokens"]
    assert named == count - 5
    child = {"x-session-id": "other", "x-parent-session-id": "s"}
    shared = (await rig.post(COUNT, minimal(messages=history), child)).json()["input_tokens"]
    assert shared == count
    begun = await rig.post(MESSAGES, minimal(messages=history), child)
    assert (begun.status_code, len(unpack_tokens(rig.engine.submits[-1].tokens))) == (200, count)


async def test_nothing_is_said_where_no_token_may_be() -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    message = await ask(rig, max_tokens=0)
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0
    assert len(rig.context.directory) == 0
    assert rig.engine.closed
    after = await ask(rig)
    assert after["usage"]["input_tokens"] == 1  # all that was computed ahead is found
    rig.check_rest()


async def test_a_result_is_computed_ahead_beside_its_session() -> None:
    rig = Rig(ScriptedEngine(say(CALL)))
    first = await ask(rig, user("Oslo?"), tools=[TOOL], session_id="s")
    before = await rig.session("s")
    [call] = first["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    turns: list[Any] = [user("Oslo?"), {"role": "assistant", "content": [call]}]
    turns.append({"role": "user", "content": [result]})
    warm = await ask(rig, *turns, tools=[TOOL], session_id="s", max_tokens=0)
    assert warm["usage"]["cache_read_input_tokens"] == usage_before(first) + first["usage"]["output_tokens"]
    assert await rig.session("s") == before
    assert before["state"] == "WAITING_TOOL"
    [(parent, child, shared)] = rig.engine.forked
    assert (parent, child) == (rig.engine.submits[0].session, rig.engine.submits[1].session)
    assert (
        shared == usage_before(first) + first["usage"]["output_tokens"] - 1
    )  # its end token is the template's
    rig.engine.reply = say("It rains.")
    second = await ask(rig, *turns, tools=[TOOL], session_id="s")
    assert second["usage"]["input_tokens"] == 1
    assert rig.engine.submits[2].turn == 2
    rig.check_rest()
