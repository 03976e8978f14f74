"""The API on real processes and the real model: sessions, tools, disconnects, siblings, choices."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import claude_code
from tests.anthropic_client import frames, put_together
from tests.api_rig import CHAT, TOOLS, events, joined, user
from tests.process.serving import url_of

pytestmark = [pytest.mark.process, pytest.mark.model]

LIMIT = 240.0
PAGE = 16
SYSTEM = {"role": "system", "content": "You are a careful assistant who answers briefly. " * 12}
FORCED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    root = str(Path(__file__).parent.parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "agentserve", "serve", "--port", "0", "--device-kv", "64MiB"]
    command += ["--private-host", "127.0.0.1"]  # for the example with an MCP server
    process = subprocess.Popen(
        [*command, "--threads", "1", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    yield url_of(process)
    process.terminate()
    process.communicate(timeout=LIMIT)
    assert process.returncode == 0


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=LIMIT) as made:
        assert made.post("/reset_prefix_cache").json() == {"success": True}
        yield made
        assert gauges(made)["agentserve_kv_pages_live"] == 0
        assert gauges(made)["agentserve_turns_active"] == 0


def gauges(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if re.match(r"agentserve_\w+ ", line))
    return {name: float(value) for name, value in pairs}


def chat(client: httpx.Client, messages: list[Any], **fields: Any) -> Any:
    body = {
        "model": "smollm2-135m",
        "messages": messages,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    reply = client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def message_of(reply: Any) -> dict[str, Any]:
    return {"role": "assistant", **reply["choices"][0]["message"]}


def ids_of(reply: Any, index: int = 0) -> list[int]:
    found: list[int] = reply["choices"][index]["token_ids"]
    return found


def test_a_tool_result_costs_its_own_tokens_only(client: httpx.Client) -> None:
    messages = [SYSTEM, user("What is the weather in Oslo?")]
    first = chat(client, messages, tools=TOOLS, tool_choice=FORCED, max_tokens=60)
    [call] = first["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city"}
    name = first["session_id"]
    shown = client.get(f"/agentserve/sessions/{name}").json()
    assert shown["state"] == "WAITING_TOOL"
    assert shown["pending_tool_calls"][0]["id"] == call["id"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Rain, 4 degrees."}
    second = chat(client, [*messages, message_of(first), result], tools=TOOLS, max_tokens=8)
    assert second["session_id"] == name
    before = first["prompt_token_ids"] + ids_of(first)
    assert second["prompt_token_ids"][: len(before)] == before
    added = len(second["prompt_token_ids"]) - len(before)
    usage = second["usage"]
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert added <= computed <= added + PAGE
    states = [step["state"] for step in client.get(f"/agentserve/sessions/{name}").json()["history"]]
    assert states[-1] == "IDLE"
    assert "WAITING_TOOL" in states


def test_a_result_by_its_own_route_is_the_turn_that_chat_would_run(client: httpx.Client) -> None:
    messages = [SYSTEM, user("What is the weather in Bergen?")]
    first = chat(client, messages, tools=TOOLS, tool_choice=FORCED, max_tokens=60)
    [call] = first["choices"][0]["message"]["tool_calls"]
    path = f"/agentserve/sessions/{first['session_id']}"
    child = client.post(f"{path}/fork").json()
    assert (child["state"], child["pending_tool_calls"]) == ("WAITING_TOOL", [call["id"]])
    content = "Rain, 4 degrees. " * 20
    upload = (piece.encode() for piece in content.split(" ") for piece in (piece, " "))
    reply = client.post(f"{path}/tool_results/{call['id']}/stream?epoch=0&max_tokens=8", content=upload)
    assert reply.status_code == 200, reply.text
    ours = reply.json()
    told = content + " "
    result = {"role": "tool", "tool_call_id": call["id"], "content": told}
    theirs = chat(
        client, [*messages, message_of(first), result], tools=TOOLS, max_tokens=8, session_id=child["id"]
    )
    assert theirs["session_id"] == child["id"]
    assert ids_of(ours) == ids_of(theirs)
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
    added = ours["usage"]["prompt_tokens"] - len(first["prompt_token_ids"] + ids_of(first))
    computed = ours["usage"]["prompt_tokens"] - ours["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert added <= computed <= added + PAGE
    again = client.post(f"{path}/tool_results", json={"call_id": call["id"], "content": told})
    assert again.json()["results"] == [{"call_id": call["id"], "status": "repeated"}]


def test_a_cached_reply_is_the_cold_reply(client: httpx.Client) -> None:
    messages = [SYSTEM, user("Name three fruits.")]
    cold = chat(client, messages, max_tokens=12)
    warm = chat(client, messages, max_tokens=12)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == cold["usage"]["prompt_tokens"] - 1
    assert ids_of(warm) == ids_of(cold)
    assert warm["session_id"] != cold["session_id"]


def test_a_stream_says_the_same_with_stop_strings_and_without(client: httpx.Client) -> None:
    messages = [user("Count from one to ten in words, separated by commas.")]
    plain = chat(client, messages, max_tokens=24)
    text = plain["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    for fields in ({}, {"stop": [stop]}):
        whole = chat(client, messages, max_tokens=24, **fields)
        body = {
            "model": "smollm2-135m",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24,
            "stream": True,
            **fields,
        }
        streamed = joined(events(client.post(CHAT, json=body).content))
        choice = whole["choices"][0]
        assert (streamed["content"], streamed["finish_reason"]) == (
            choice["message"]["content"],
            choice["finish_reason"],
        )
        if fields:
            assert streamed["content"] == text[: text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", ["PREFILLING", "DECODING"])
def test_a_client_that_leaves_frees_everything(
    client: httpx.Client, url: str, stream: bool, wanted: str
) -> None:
    name = f"leaves-{stream}-{wanted}"
    start = [SYSTEM, user("Say hello.")]
    first = chat(client, start, max_tokens=8, session_id=name)
    question = "Tell a long story. " * (60 if wanted == "PREFILLING" else 1)
    history = [*start, message_of(first), user(question)]
    before = client.get(f"/agentserve/sessions/{name}").json()

    async def leave() -> None:
        body = {
            "model": "smollm2-135m",
            "messages": history,
            "session_id": name,
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": stream,
        }
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as guest:
            task = asyncio.create_task(guest.post(CHAT, json=body))
            while (await guest.get("/agentserve/sessions")).json()["data"][0]["state"] not in (
                wanted,
                "DECODING",
            ):
                assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while (await guest.get("/agentserve/sessions")).json()["data"][0]["running_turn"] is not None:
                pass

    asyncio.run(leave())
    after = client.get(f"/agentserve/sessions/{name}").json()
    for key in ("state", "turns", "tokens", "messages", "usage"):
        assert after[key] == before[key]
    again = chat(client, history, max_tokens=6, session_id=name)
    assert again["session_id"] == name
    client.post("/reset_prefix_cache")
    cold = chat(client, history, max_tokens=6)
    assert again["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    if again["prompt_token_ids"] == cold["prompt_token_ids"]:  # re-encoded text may split differently
        assert ids_of(again) == ids_of(cold)


def test_concurrent_turns_of_one_lineage_are_both_right(client: httpx.Client, url: str) -> None:
    start = [SYSTEM, user("Say hello.")]
    first = chat(client, start, max_tokens=8, session_id="shared")
    histories = [
        [*start, message_of(first), user(f"Write the number {number} in words.")] for number in (11, 22, 33)
    ]

    async def all_at_once() -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as guest:
            bodies = [
                {
                    "model": "smollm2-135m",
                    "messages": history,
                    "temperature": 0,
                    "max_tokens": 10,
                    "session_id": "shared",
                    "return_token_ids": True,
                }
                for history in histories
            ]
            replies = await asyncio.gather(*(guest.post(CHAT, json=body) for body in bodies))
            return [reply.json() for reply in replies]

    replies = asyncio.run(all_at_once())
    names = [reply["session_id"] for reply in replies]
    assert len(set(names)) == 3
    assert "shared" in names
    for reply, history in zip(replies, histories, strict=True):
        shown = client.get(f"/agentserve/sessions/{reply['session_id']}").json()
        assert shown["parent"] == (None if reply["session_id"] == "shared" else "shared")
        client.post("/reset_prefix_cache")
        alone = client.post(
            "/v1/completions",
            json={
                "prompt": reply["prompt_token_ids"],
                "temperature": 0,
                "max_tokens": 10,
                "return_token_ids": True,
            },
        ).json()
        said = ids_of(reply)
        assert said == ids_of(alone)[: len(said)]
        assert history[-1]["content"]


def test_choices_compute_their_prompt_once(client: httpx.Client) -> None:
    reply = chat(client, [SYSTEM, user("A joke, please.")], n=4, max_tokens=6, temperature=1, seed=3)
    usage = reply["usage"]
    assert len({tuple(ids_of(reply, index)) for index in range(4)}) > 1
    assert usage["agentserve"]["computed_tokens"] <= usage["prompt_tokens"] + 4 * (6 + PAGE)
    again = chat(client, [SYSTEM, user("A joke, please.")], n=4, max_tokens=6, temperature=1, seed=3)
    assert [ids_of(again, i) for i in range(4)] == [ids_of(reply, i) for i in range(4)]


def test_a_schema_holds_whatever_the_model_would_say(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(3):
        reply = chat(client, [user("Talk!")], response_format=wanted, temperature=2, seed=seed, max_tokens=60)
        assert reply["choices"][0]["finish_reason"] == "stop"
        value = json.loads(reply["choices"][0]["message"]["content"])
        assert isinstance(value["ok"], bool)
        assert value["n"] in (1, 2, 3)


def test_other_forms_hold_the_answer(client: httpx.Client) -> None:
    messages = [user("Is it raining?")]
    reply = chat(client, messages, guided_choice=["maybe", "never"], max_tokens=20)
    assert reply["choices"][0]["message"]["content"] in ("maybe", "never")
    reply = chat(client, messages, structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"}, max_tokens=20)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", reply["choices"][0]["message"]["content"])
    reply = chat(client, messages, structured_outputs={"grammar": 'root ::= "x" [yz]'}, max_tokens=20)
    assert reply["choices"][0]["message"]["content"] in ("xy", "xz")


def test_the_openai_sdk_runs_a_tool(client: httpx.Client, url: str) -> None:
    sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
    messages: list[Any] = [SYSTEM, user("Weather in Rome?")]
    with sdk.chat.completions.stream(
        model="smollm2-135m", messages=messages, tools=TOOLS, tool_choice=FORCED, max_tokens=60, temperature=0
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sun."}
    reply = sdk.chat.completions.create(
        model="smollm2-135m", messages=[*messages, message, result], tools=TOOLS, max_tokens=8
    )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens_details.cached_tokens or 0) > 100
    sdk.close()


def test_claude_code_computes_only_what_is_new(client: httpx.Client) -> None:
    def told(nonce: str, *turns: Any) -> Any:
        body = claude_code.body(nonce, *turns, model="smollm2-135m", max_tokens=12, temperature=0)
        count = client.post("/v1/messages/count_tokens", json={**body, "stream": None})
        reply = client.post(claude_code.PATH, json=body, headers=claude_code.HEADERS)
        assert reply.status_code == 200, reply.text
        message = put_together(frames(reply.content))
        usage = message["usage"]
        size = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert count.json() == {"input_tokens": size}
        return message, size

    first, before = told("a1b2c")
    block = {"type": "text", "text": "Now be briefer."}
    turns = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [block]}]
    second, after = told("ffff0", *turns)
    added = after - before - first["usage"]["output_tokens"]
    assert before > 400
    assert 0 < added < 40
    assert added <= second["usage"]["input_tokens"] <= added + PAGE


def test_plain_curl(client: httpx.Client, url: str) -> None:
    body = json.dumps({"model": "smollm2-135m", "messages": [user("Hi")], "max_tokens": 4, "stream": True})
    run = subprocess.run(
        ["curl", "-sN", f"{url}{CHAT}", "-H", "content-type: application/json", "-d", body],
        capture_output=True,
        timeout=LIMIT,
        check=True,
    )
    assert run.stdout.endswith(b"data: [DONE]\n\n")
    assert joined(events(run.stdout))["content"]
