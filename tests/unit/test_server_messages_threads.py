"""Threads: histories that the server keeps, gone on from by their last reply."""

from __future__ import annotations

from typing import Any

from agentserve.messages import unpack_tokens
from agentserve.types import SessionId
from tests.api_rig import Rig, user
from tests.fakes import ScriptedEngine, say
from tests.journal_rig import kept
from tests.messages_rig import CALL, COUNT, MESSAGES, TOOL, ask, minimal, refusal
from tests.session_stores import MemoryStore


async def test_a_thread_is_gone_on_from_by_its_last_reply() -> None:
    rig = Rig(ScriptedEngine(say(CALL)))
    first = await ask(
        rig, user("Oslo?"), system="Be brief.", tools=[TOOL], thread={"type": "create"}, stream=True
    )
    [call] = first["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    on = {"type": "continue", "previous_message_id": first["id"]}
    told: Any = {"role": "user", "content": [result]}
    count = (await rig.post(COUNT, {"model": "tiny", "messages": [told], "thread": on})).json()
    second = await ask(rig, told, thread=on)
    one, two = (unpack_tokens(submit.tokens) for submit in rig.engine.submits)
    assert two[: len(one)] == one
    assert count == {"input_tokens": len(two)}
    assert second["usage"]["cache_read_input_tokens"] == len(one) + first["usage"]["output_tokens"]
    assert second["content"][0]["type"] == "tool_use"  # the thread's tools are there without being sent

    result["content"] = "Never mind."
    again = [told]
    branch = await ask(rig, *again, thread=on)  # from the first reply once more
    assert branch["id"] != second["id"]
    assert len({submit.session for submit in rig.engine.submits}) == 2
    rig.engine.reply = say("Bye.")
    [call] = branch["content"]
    result["tool_use_id"] = call["id"]
    last = await ask(rig, *again, thread={"type": "continue", "previous_message_id": branch["id"]})
    assert last["content"][0]["text"] == "Bye."
    assert rig.engine.submits[-1].session == rig.engine.submits[-2].session
    rig.check_rest()


async def test_a_thread_that_is_not_kept_is_to_be_sent_whole() -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    first = await ask(rig, thread={"type": "create"})
    key = first["id"].partition("_")[2].partition("_")[2]
    for name in (
        "",
        "x",
        "msg_",
        "msg_1_",
        "msg_1_other",
        f"msg_2_{key}",
        f"msg_x_{key}",
        f"msg_{'9' * 30}_{key}",
    ):
        body = minimal(thread={"type": "continue", "previous_message_id": name})
        reply = await rig.post(MESSAGES, body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error"), name
        assert reply.json()["error"]["details"] == {"error_code": "thread_not_found"}
    rig.context.chronicle.transcripts.forget(SessionId(key))
    body = minimal(thread={"type": "continue", "previous_message_id": first["id"]})
    assert (await rig.post(MESSAGES, body)).status_code == 404
    assert (await refusal(rig, minimal(thread={"type": "end"})))[0] == 400
    rig.check_rest()


async def test_a_thread_outlives_the_server() -> None:
    store = MemoryStore()
    async with kept(store) as k:
        first = await ask(k.rig, system="Be brief.", thread={"type": "create"})
    async with kept(store, passed=5.0) as k:
        on = {"type": "continue", "previous_message_id": first["id"]}
        await ask(k.rig, user("And?"), thread=on)
        [submit] = k.rig.engine.submits
        assert submit.turn == 2
        prompt = k.rig.context.tokenizer.decode(unpack_tokens(submit.tokens))
        assert prompt.index("Be brief.") < prompt.index("Hello!") < prompt.index("And?")
