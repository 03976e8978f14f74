"""POST /v1/messages and count_tokens on a scripted engine: shapes, errors, sessions, usage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentserve.messages import unpack_tokens
from agentserve.types import FinishReason, SessionId
from tests import claude_code
from tests.anthropic_client import frames, put_together
from tests.api_rig import TOOLS, Rig, hermes, served, settled, user
from tests.fakes import Script, ScriptedEngine, say
from tests.journal_rig import kept
from tests.session_stores import MemoryStore

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "weather", "description": "Weather.", "input_schema": {"type": "object"}}
CALL = hermes("weather", '{"city": "Oslo"}')


async def ask(rig: Rig, *messages: Any, headers: Any = None, **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 100, "messages": messages or [user("hi")], **fields}
    reply = await rig.post(MESSAGES, body, headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    if fields.get("stream"):
        assert reply.headers["content-type"].startswith("text/event-stream")
        return put_together(frames(reply.content))
    return reply.json()


async def refusal(rig: Rig, body: Any, path: str = MESSAGES, headers: Any = None) -> tuple[int, str, str]:
    reply = await rig.post(path, body, headers)
    told = reply.json()
    assert set(told) == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return reply.status_code, told["error"]["type"], told["error"]["message"]


def minimal(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 9, "messages": [user("hi")], **fields}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    message = await ask(rig, stream=stream)
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert usage["input_tokens"] == len(unpack_tokens(rig.engine.submits[0].tokens))
    assert usage["output_tokens"] == len("Hello.") + 1
    rig.check_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_stops(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("one END two")))
    message = await ask(rig, stream=stream, stop_sequences=["END", "zwei"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert message["content"][0]["text"] == "one "
    message = await ask(rig, stream=stream, max_tokens=3)
    assert (message["stop_reason"], message["content"][0]["text"]) == ("max_tokens", "one")


async def test_an_answer_that_the_context_ends() -> None:
    rig = Rig(ScriptedEngine(say("0123456789" * 20), max_model_len=128))
    assert (await ask(rig, max_tokens=10_000))["stop_reason"] == "model_context_window_exceeded"
    assert (await ask(rig, max_tokens=4))["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_round_trip_computes_only_what_is_new(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("Let me see." + CALL)))
    first = await ask(rig, user("Oslo?"), tools=[TOOL], stream=stream)
    assert first["stop_reason"] == "tool_use"
    words, call = first["content"]
    assert (words["text"], call["name"]) == ("Let me see.", "weather")
    arguments = json.loads(call.pop("partial")) if stream else call["input"]
    assert arguments == {"city": "Oslo"}
    [session] = rig.context.directory.sessions("default")
    assert list(session.pending) == [call["id"]]

    rig.engine.reply = say("It rains.")
    history = [
        user("Oslo?"),
        {"role": "assistant", "content": [words, call | {"input": arguments}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}]},
    ]
    second = await ask(rig, *history, tools=[TOOL], stream=stream)
    assert second["content"][0]["text"] == "It rains."
    one, two = rig.engine.submits
    assert (one.session, one.turn, two.turn) == (two.session, 1, 2)
    usage = second["usage"]
    size = len(unpack_tokens(two.tokens))
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == size
    assert usage["cache_read_input_tokens"] == usage_before(first) + first["usage"]["output_tokens"]
    rig.check_rest()


def usage_before(message: Any) -> int:
    usage = message["usage"]
    total: int = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return total


async def test_a_call_by_order() -> None:
    rig = Rig(ScriptedEngine(say(CALL)))
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    message = await ask(rig, tools=[TOOL], tool_choice=choice)
    assert message["stop_reason"] == "tool_use"
    [form] = rig.grammars.asked
    assert (form.choice, form.named, form.parallel) == ("named", "weather", False)
    assert (await ask(rig, tools=[TOOL], tool_choice={"type": "none"}))["stop_reason"] == "end_turn"


async def test_an_output_format() -> None:
    rig = Rig(ScriptedEngine(say("{}")))
    schema = {"type": "object"}
    await ask(rig, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert (rig.grammars.asked[0].json, rig.grammars.asked[0].schema) == (True, schema)
    bad = minimal(output_config={"format": {"type": "json_schema", "schema": {"type": "nonsense"}}})
    status, kind, message = await refusal(rig, bad)
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("output_config.format: ")


async def test_an_answer_goes_on_from_the_last_turn() -> None:
    rig = Rig(ScriptedEngine(say("B)")))
    await ask(rig, user("?"), {"role": "assistant", "content": "The best is ("})
    assert rig.context.tokenizer.decode(unpack_tokens(rig.engine.submits[0].tokens)).endswith("The best is (")


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ("{", 400, "invalid_request_error", "JSON"),
        ({"model": "tiny", "messages": [user("a")]}, 400, "invalid_request_error", "max_tokens"),
        (minimal(max_tokens=-1), 400, "invalid_request_error", "max_tokens: must be at least 1"),
        (minimal(max_tokens=0, stream=True), 400, "invalid_request_error", "max_tokens"),
        (minimal(messages=[]), 400, "invalid_request_error", "at least one message"),
        (minimal(model="gpt"), 404, "not_found_error", "'gpt' does not exist"),
        (minimal(temperature=9), 400, "invalid_request_error", "temperature: "),
        (minimal(stop_sequences=[""]), 400, "invalid_request_error", "stop_sequences: "),
        (minimal(tool_choice={"type": "tool", "name": "f"}), 400, "invalid_request_error", "tool_choice: "),
        (minimal(tools=[TOOL | {"name": "a b"}]), 400, "invalid_request_error", "tools[0].name: "),
        (minimal(messages=[user("BREAK")]), 400, "invalid_request_error", "messages[0]: this template"),
        (minimal(messages=[user("x" * 5000)]), 400, "invalid_request_error", "prompt is too long"),
        (minimal(session_id="a b"), 400, "invalid_request_error", "session_id: "),
    ],
)
async def test_bad_requests(body: Any, status: int, kind: str, words: str) -> None:
    rig = Rig()
    told = await refusal(rig, body)
    assert told[:2] == (status, kind)
    assert words in told[2]
    assert not rig.engine.submits
    rig.check_rest()


async def test_a_result_for_no_call_names_its_block() -> None:
    content = [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "c", "content": "y"}]
    messages = [user("a"), {"role": "assistant", "content": "b"}, {"role": "user", "content": content}]
    _, _, message = await refusal(Rig(), minimal(messages=messages))
    assert message.startswith("messages[2].content[1].tool_use_id: ")


async def test_a_prompt_that_is_too_long_says_both_numbers() -> None:
    rig = Rig(ScriptedEngine(max_model_len=64))
    _, _, message = await refusal(rig, minimal(messages=[user("x" * 60)]))
    tokens = (await rig.post(COUNT, minimal(messages=[user("x" * 60)]))).json()["input_tokens"]
    assert message.startswith(f"prompt is too long: {tokens} tokens > 64 maximum. ")


async def test_errors_of_the_path_and_of_the_gate() -> None:
    rig = Rig(api_keys=("secret",))
    assert (await refusal(rig, minimal()))[:2] == (401, "authentication_error")
    key = {"x-api-key": "secret"}
    assert (await rig.post(MESSAGES, minimal(), key)).status_code == 200
    assert (await rig.post(MESSAGES, minimal(), {"authorization": "Bearer secret"})).status_code == 200
    assert (await refusal(rig, {}, "/v1/messages/batches", key))[:2] == (404, "not_found_error")
    got = await rig.client.get(MESSAGES, headers=key)
    assert (got.status_code, got.json()["error"]["type"]) == (405, "invalid_request_error")
    assert got.headers["allow"] == "POST"
    other = await rig.client.get("/v1/messagesx", headers=key)
    assert "type" not in other.json()
    foreign = await refusal(Rig(), minimal(), headers={"host": "evil.example"})
    assert foreign[:2] == (403, "permission_error")


async def test_engine_failures() -> None:
    rig = Rig(ScriptedEngine(say("half", reason=FinishReason.ERROR, error="out of memory")))
    assert await refusal(rig, minimal()) == (500, "api_error", "out of memory")
    reply = await rig.post(MESSAGES, minimal(stream=True))
    *_, last = frames(reply.content)
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "out of memory"},
        "request_id": reply.headers["request-id"],
    }
    rig.engine.alive = 0
    assert (await refusal(rig, minimal()))[:2] == (503, "overloaded_error")
    rig.check_rest()


async def test_a_fault_of_ours_is_told_in_the_shape_too() -> None:
    def broken(submit: Any) -> Script:
        raise RuntimeError("oh")

    rig = Rig(ScriptedEngine(broken))
    assert await refusal(rig, minimal()) == (500, "api_error", "Internal error.")
    rig.check_rest()


async def test_pings_keep_a_silent_stream_alive() -> None:
    script = say("Hello.", hold_at=1)
    rig = Rig(ScriptedEngine(script), keep_alive_seconds=0.01)
    body = b""
    async with (
        served(rig.app) as base,
        httpx.AsyncClient(base_url=base) as client,
        client.stream("POST", MESSAGES, json=minimal(stream=True)) as reply,
    ):
        async for chunk in reply.aiter_bytes():
            body += chunk
            if body.count(b"event: ping") > 4:
                script.release.set()
    assert put_together(frames(body))["content"][0]["text"] == "Hello."


async def test_a_client_that_leaves_ends_its_turn() -> None:
    rig = Rig(ScriptedEngine(say("Hello.", hold_at=2)))
    async with served(rig.app) as base:
        host, port = base.removeprefix("http://").split(":")
        for stream in (False, True):
            reader, writer = await asyncio.open_connection(host, int(port))
            content = json.dumps(minimal(stream=stream)).encode()
            head = f"POST {MESSAGES} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            await settled(lambda: bool(rig.engine.live))
            if stream:
                await reader.readuntil(b"text_delta")
            writer.close()
            await settled(lambda: not rig.engine.live and not len(rig.context.directory))
    assert len(rig.engine.aborted) == 2


async def claude_asks(rig: Rig, nonce: str, *turns: Any, **more: Any) -> tuple[Any, str]:
    reply = await rig.post(claude_code.PATH, claude_code.body(nonce, *turns, **more), claude_code.HEADERS)
    assert reply.status_code == 200, reply.text
    return put_together(frames(reply.content)), reply.headers["x-session-id"]


def claude_says(message: Any) -> Any:
    """A streamed message as it comes back: with its calls' inputs as objects."""
    content = [
        block | {"input": json.loads(block["partial"])} if block["type"] == "tool_use" else block
        for block in message["content"]
    ]
    return {"role": "assistant", "content": content}


async def test_claude_code_asks_twice_and_its_nonce_costs_nothing() -> None:
    rig = Rig(ScriptedEngine(say(hermes("Read", '{"file_path": "README.md"}')), max_model_len=20_000))
    first, session = await claude_asks(rig, "a1b2c")
    [call] = first["content"]
    assert (call["name"], first["stop_reason"]) == ("Read", "tool_use")
    prompt = rig.context.tokenizer.decode(unpack_tokens(rig.engine.submits[0].tokens))
    assert "billing" not in prompt
    assert "web_search" not in prompt

    rig.engine.reply = say("A readme.")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "# Title"}
    turn = {"role": "user", "content": [result, {"type": "text", "text": claude_code.REMINDER}]}
    second, same = await claude_asks(rig, "ffff0", claude_says(first), turn)
    assert same == session
    assert second["usage"]["cache_read_input_tokens"] == usage_before(first) + first["usage"]["output_tokens"]
    assert second["usage"]["input_tokens"] < len(claude_code.REMINDER) + 100


async def test_tools_that_claude_code_finds_later_cost_their_own_tokens() -> None:
    rig = Rig(ScriptedEngine(say(hermes("ToolSearch", '{"query": "cron"}')), max_model_len=20_000))
    first, _ = await claude_asks(rig, "a1b2c")
    prompt = rig.context.tokenizer.decode(unpack_tokens(rig.engine.submits[0].tokens))
    assert "DeferredToolPlaceholder" not in prompt

    rig.engine.reply = say(hermes("CronList", "{}"))
    found = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": claude_code.FOUND}
    turns = [claude_says(first), {"role": "user", "content": [found]}]
    second, _ = await claude_asks(rig, "ffff0", *turns, tools=claude_code.MORE_TOOLS)
    assert second["content"][0]["name"] == "CronList"
    assert second["usage"]["cache_read_input_tokens"] == usage_before(first) + first["usage"]["output_tokens"]
    prompt = rig.context.tokenizer.decode(unpack_tokens(rig.engine.submits[1].tokens))
    assert prompt.count("CronList for the agent. " * 4) == 1
    assert prompt.index("NotebookEdit for the agent.") > prompt.index("What is in README.md?")

    listed = {"type": "tool_result", "tool_use_id": second["content"][0]["id"], "content": "No jobs."}
    turns += [claude_says(second), {"role": "user", "content": [listed]}]
    third, _ = await claude_asks(
        rig, "0", *turns, tools=claude_code.MORE_TOOLS, tool_choice={"type": "any"}, stream=True
    )
    assert third["usage"]["input_tokens"] < 100
    [form] = rig.grammars.asked  # a tool that was found may be called, one that was not may not
    assert [tool["function"]["name"] for tool in form.tools] == [
        "Bash",
        "Read",
        "ToolSearch",
        "Write",
        "NotebookEdit",
        "CronList",
    ]
    rig.check_rest()


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


async def test_a_session_goes_on_in_the_other_dialect() -> None:
    rig = Rig(ScriptedEngine(say("Let me see. " + CALL)))
    first = await ask(rig, user("Oslo?"), tools=[TOOL], session_id="s")
    words, call = first["content"]
    rig.engine.reply = say("It rains.")
    assistant = {
        "role": "assistant",
        "content": words["text"],
        "tool_calls": [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps(call["input"])},
            }
        ],
    }
    history = [user("Oslo?"), assistant, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    chat = await rig.chat(history, tools=[{"type": "function", "function": {"name": "weather"}}, TOOLS[1]])
    assert chat["session_id"] == "s"
    rig.engine.reply = say("Yes.")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    back = [
        user("Oslo?"),
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "It rains."},
        user("Sure?"),
    ]
    await ask(rig, *back, tools=[TOOL])
    assert [submit.turn for submit in rig.engine.submits] == [1, 2, 3]
    assert len({submit.session for submit in rig.engine.submits}) == 1


async def test_a_result_brought_by_its_own_route() -> None:
    rig = Rig(ScriptedEngine(say(CALL)))
    first = await ask(rig, user("Oslo?"), tools=[TOOL], session_id="s")
    rig.engine.reply = say("It rains.")
    result = {"call_id": first["content"][0]["id"], "content": "rain"}
    reply = await rig.post("/agentserve/sessions/s/tool_results", result)
    assert reply.json()["choices"][0]["message"]["content"] == "It rains."


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

    again = [{"role": "user", "content": "Never mind."}]
    branch = await ask(rig, *again, thread=on)  # from the first reply once more
    assert branch["id"] != second["id"]
    assert len({submit.session for submit in rig.engine.submits}) == 2
    rig.engine.reply = say("Bye.")
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


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 1),
        ({"cache_control": {"type": "ephemeral"}}, 0),
        ({"tools": [TOOL | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 1),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 1),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]}, 0),
    ],
)
async def test_an_hour_is_worth_more_than_five_minutes(fields: Any, priority: int) -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    await ask(rig, session_id="s", **fields)
    assert rig.engine.hints[-1].priority == priority


async def test_a_priority_that_was_given_stays() -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    await ask(rig, session_id="s")
    await rig.post("/agentserve/sessions/s/hints", {"priority": -1})
    history = [user("hi"), {"role": "assistant", "content": "Hello."}, user("b")]
    await ask(rig, *history, session_id="s", cache_control={"type": "ephemeral", "ttl": "1h"})
    assert rig.engine.hints[-1].priority == -1


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


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_the_drain_tells_the_client(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("abc", hold_at=1)))
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    content = json.dumps(minimal(stream=stream)).encode()
    inbox.put_nowait({"type": "http.request", "body": content, "more_body": False})
    sent: list[Any] = []

    async def deliver(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": MESSAGES, "headers": [], "query_string": b""}
    answer = asyncio.create_task(rig.app(scope, inbox.get, deliver))
    await settled(
        lambda: (
            rig.engine.live and (not stream or b"text_delta" in b"".join(m.get("body", b"") for m in sent))
        )
    )
    answer.cancel()  # as the HTTP server does
    await answer
    body = b"".join(message.get("body", b"") for message in sent)
    told = frames(body)[-1] if stream else json.loads(body)
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
    assert not rig.engine.live
    rig.check_rest()
