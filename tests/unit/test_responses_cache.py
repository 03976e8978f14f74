"""What of a prompt is computed already: `prewarm`, and why the cache did not serve."""

from __future__ import annotations

from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import Rig, user
from tests.fakes import ScriptedEngine, say, shared
from tests.responses_rig import CALL, RESPONSES, WEATHER, Client, call_of, checked, result


@pytest.fixture
def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello!")))


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig)


async def test_prewarming(rig: Rig, client: Client) -> None:
    first = await client.create("one", says="first", tools=[WEATHER])
    before = await rig.session(first["session_id"])
    warm = await client.create(
        "two",
        says="never said",
        tools=[WEATHER],
        previous_response_id=first["id"],
        prompt_cache_options={"prewarm": True},
    )
    assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
    assert rig.engine.submits[1].sampling.max_tokens == 1
    assert rig.engine.forked[-1][0] == rig.engine.submits[0].session
    assert await rig.session(first["session_id"]) == before
    assert rig.engine.closed == [rig.engine.submits[1].session]
    real = await client.create("two", says="second", tools=[WEATHER], previous_response_id=first["id"])
    assert real["session_id"] == first["session_id"]
    warmed = unpack_tokens(rig.engine.submits[1].tokens)
    assert unpack_tokens(rig.engine.submits[2].tokens) == warmed
    assert real["usage"]["input_tokens_details"]["cached_tokens"] == len(warmed) - 1
    after = await client.create("three", says="third", tools=[WEATHER], previous_response_id=warm["id"])
    prompt = bytes(t for t in unpack_tokens(rig.engine.submits[3].tokens) if t < 256)
    assert b"two" in prompt
    assert after["status"] == "completed"
    rig.check_rest()


async def test_prewarming_while_a_tool_runs_changes_nothing(rig: Rig, client: Client) -> None:
    first = await client.create("one", says=CALL, tools=[WEATHER])
    before = await rig.session(first["session_id"])
    assert before["state"] == "WAITING_TOOL"
    items = [result(call_of(first), "it is")]
    options = {"prewarm": True}
    events = await client.stream(
        items, says="x", tools=[WEATHER], previous_response_id=first["id"], prompt_cache_options=options
    )
    assert checked(events)["usage"]["output_tokens"] == 0
    assert await rig.session(first["session_id"]) == before
    error = await client.refused("x" * 5000, prompt_cache_options=options)
    assert error["code"] == "context_length_exceeded"


async def test_why_the_cache_did_not_serve(client: Client) -> None:
    first = await client.create("one " * 20, says="first", tools=[WEATHER])

    async def diagnosed(given: Any, **fields: Any) -> Any:
        options = {"comparison_response_id": first["id"]}
        made = await client.create(given, says="x", prompt_cache_options=options, **fields)
        return made["prompt_cache_diagnostics"], made["usage"]["input_tokens"]

    same, _ = await diagnosed("two", tools=[WEATHER], previous_response_id=first["id"])
    assert same == {"type": "cache_hit"}
    other, size = await diagnosed("one " * 19 + "two", tools=[WEATHER])
    assert (other["type"], other["reason"]) == ("cache_miss", "input_changed")
    submits = client.rig.engine.submits
    reusable = shared(unpack_tokens(submits[0].tokens), unpack_tokens(submits[2].tokens))
    assert (other["comparison_reusable_tokens"], other["cache_missed_tokens"]) == (reusable, size - reusable)
    tools, _ = await diagnosed("one " * 20)
    assert tools["reason"] == "tools_changed"
    key, _ = await diagnosed("two", tools=[WEATHER], prompt_cache_key="k")
    assert key["reason"] == "prompt_cache_key_changed"
    options = {"comparison_response_id": "resp_no"}
    made = await client.create("x", prompt_cache_options=options)
    assert made["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


async def test_a_prompt_is_counted_in_the_session_that_it_would_go_on(client: Client) -> None:
    """Named by a header, or known by its history: with the ids that were generated, whatever their text
    would be encoded to."""
    rig = client.rig
    await client.create("one", says="first")
    [session] = rig.context.directory.sessions("default")
    session.replies[1].extend([97] * 5)  # as if its tokens were shorter than the text's
    history = [user("one"), {"role": "assistant", "content": "first"}, user("two")]

    async def count(headers: dict[str, str] | None = None) -> Any:
        reply = await rig.post(f"{RESPONSES}/input_tokens", {"model": "tiny", "input": history}, headers)
        assert reply.status_code == 200, reply.text
        return reply.json()["input_tokens"]

    found = await count()
    assert await count({"x-session-id": session.public_id}) == found
    assert await count({"x-session-id": "other"}) == found - 5
    made = await client.create(history, says="second")
    assert (made["session_id"], made["usage"]["input_tokens"]) == (session.public_id, found)


async def test_prewarming_leaves_the_grammar_there_too(client: Client) -> None:
    form = {"format": {"type": "json_object"}}
    await client.create("x", says="{}", text=form, prompt_cache_options={"prewarm": True})
    await client.create("x", says="{}", text=form)
    warmed, asked = client.rig.grammars.asked
    assert warmed == asked
