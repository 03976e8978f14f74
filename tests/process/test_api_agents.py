"""Coding agents' requests over a real socket, a scripted model behind it: whole bodies, a tool call between
two turns, and of the second nothing is computed but what is new."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from agentserve.messages import unpack_tokens
from tests import claude_code, coding_agents
from tests.anthropic_client import frames, put_together
from tests.api_rig import CHAT, Rig, events, hermes, joined, served
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import usage_before
from tests.responses_rig import RESPONSES, checked, parsed

RESULT = "README.md\na.py"
FRAMING = 60  # tokens that a template puts around a result


@asynccontextmanager
async def agent(*texts: str, **options: Any) -> AsyncIterator[tuple[Rig, httpx.AsyncClient]]:
    """A server whose model says these texts in turn, and a client of it."""
    left = iter(texts)
    rig = Rig(ScriptedEngine(lambda submit: say(next(left)), max_model_len=20_000), **options)
    async with served(rig.app) as base, httpx.AsyncClient(base_url=base, timeout=30) as client:
        yield rig, client
    rig.check_rest()


async def post(client: httpx.AsyncClient, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    reply = await client.post(path, content=json.dumps(body), headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


def shown(rig: Rig, index: int = -1) -> str:
    tokens = unpack_tokens(rig.engine.submits[index].tokens)
    return bytes(token for token in tokens if token < 256).decode()


def one_lineage(rig: Rig, *cached: int) -> None:
    """Every turn is one session's, and what was not computed of it is all that was there before."""
    submits = rig.engine.submits
    assert len({submit.session for submit in submits}) == 1
    assert [submit.turn for submit in submits] == list(range(1, len(submits) + 1))
    prompts = [unpack_tokens(submit.tokens) for submit in submits]
    for (before, after), known in zip(pairwise(prompts), cached, strict=True):
        assert after[: len(before)] == before
        assert known > len(before)  # the answer, too


# --- Claude Code -------------------------------------------------------------------------------

MCP = {
    "name": "mcp__github__list_issues",
    "description": "Lists issues.",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"repo": {"type": "string"}, "state": {"enum": ["open", "closed"]}},
        "required": ["repo"],
    },
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
}


def claude_says(message: Any) -> Any:
    content = [
        block | {"input": json.loads(block["partial"])} if block["type"] == "tool_use" else block
        for block in message["content"]
    ]
    return {"role": "assistant", "content": [{k: v for k, v in b.items() if k != "partial"} for b in content]}


@pytest.mark.parametrize("thinking", ["omitted", "summarized"])
async def test_claude_code(thinking: str) -> None:
    """It thinks, calls a tool of an MCP server, is counted, and reads a screenshot on its way."""
    call = hermes("mcp__github__list_issues", '{"repo": "a/b"}')
    read = hermes("Read", '{"file_path": "shot.png"}')
    more = {
        "tools": [*claude_code.TOOLS, MCP],
        "thinking": {"type": "adaptive", "display": thinking},
    }
    texts = [f"<think>\nIssues?\n</think>\nI look.\n{call}", f"Now the picture.\n{read}", "Nothing there."]
    async with agent(*texts) as (rig, client):

        async def ask(nonce: str, *turns: Any) -> Any:
            body = claude_code.body(nonce, *turns, **more)
            reply = await post(client, claude_code.PATH, body, claude_code.HEADERS)
            assert reply.headers["x-session-id"] == claude_code.HEADERS["x-claude-code-session-id"]
            return put_together(frames(reply.content))

        first = await ask("a1b2c")
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
        assert (first["content"][0]["thinking"] == "") == (thinking == "omitted")
        assert "billing" not in shown(rig)
        result: Any = {"tool_use_id": first["content"][-1]["id"], "type": "tool_result"}
        result |= {"content": [{"type": "text", "text": "#1 It rains"}]}
        note = {"type": "text", "text": claude_code.REMINDER}
        turns = [claude_says(first), {"role": "user", "content": [result, note]}]

        counted = claude_code.body("fffff", *turns, **more)
        counted = {key: counted[key] for key in ("model", "messages", "system", "tools", "thinking")}
        path = claude_code.PATH.replace("messages", "messages/count_tokens")
        tokens = (await post(client, path, counted, claude_code.HEADERS)).json()["input_tokens"]

        second = await ask("ffff0", *turns)
        usage = second["usage"]
        assert usage_before(second) == tokens
        assert usage["cache_read_input_tokens"] == usage_before(first) + first["usage"]["output_tokens"]
        assert usage["input_tokens"] < len("#1 It rains" + claude_code.REMINDER) + FRAMING

        image = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
        result = {"tool_use_id": second["content"][-1]["id"], "type": "tool_result", "is_error": False}
        result |= {"content": [{"type": "image", "source": image}]}
        turns += [claude_says(second), {"role": "user", "content": [result]}]
        third = await ask("00000", *turns)
        assert third["content"][0]["text"] == "Nothing there."
        read_before = third["usage"]["cache_read_input_tokens"]
        assert read_before == usage_before(second) + second["usage"]["output_tokens"]
        assert "[image: not readable by this model]" in shown(rig)
        one_lineage(rig, usage["cache_read_input_tokens"], read_before)


async def test_claude_code_s_side_requests_leave_its_session_alone() -> None:
    """A title is asked for under the same session header, and a sub-agent has a header of its own."""
    async with agent(hermes("Bash", '{"command": "ls"}'), '{"title": "Files"}', "Sub.", "Done.") as (
        rig,
        client,
    ):
        body = claude_code.body("a1b2c")
        first = put_together(
            frames((await post(client, claude_code.PATH, body, claude_code.HEADERS)).content)
        )
        title: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "What is in README.md?"}]}],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332; cch=1;"},
                {"type": "text", "text": "Write a title in JSON."},
            ],
            "tools": [],
            "max_tokens": 64,
            "temperature": 1,
            "output_config": {
                "format": {
                    "type": "json_schema",
                    "schema": {
                        "type": "object",
                        "properties": {"title": {"type": "string"}},
                        "required": ["title"],
                        "additionalProperties": False,
                    },
                }
            },
            "stream": True,
        }
        await post(client, claude_code.PATH, title, claude_code.HEADERS)
        sub = claude_code.HEADERS | {"x-claude-code-agent-id": "agent-7"}
        reply = await post(client, claude_code.PATH, claude_code.body("b", system="You search."), sub)
        assert reply.headers["x-session-id"] == "agent-7"
        result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": RESULT}
        body = claude_code.body("ffff0", claude_says(first), {"role": "user", "content": [result]})
        reply = await post(client, claude_code.PATH, body, claude_code.HEADERS)
        last = put_together(frames(reply.content))
        before = usage_before(first) + first["usage"]["output_tokens"]
        assert last["usage"]["cache_read_input_tokens"] == before
        assert last["usage"]["input_tokens"] < len(RESULT) + FRAMING
        assert rig.engine.submits[-1].session == rig.engine.submits[0].session


# --- Codex -------------------------------------------------------------------------------------


async def test_codex() -> None:
    """Reasoning comes back packed, tools of kinds that are not ours are skipped, two calls at once."""
    calls = hermes("exec_command", '{"cmd": "ls"}') + "\n" + hermes("mcp__files__list", "{}")
    async with agent(f"<think>\nA look.\n</think>\nI look.\n{calls}", "Two files.") as (rig, client):
        history = list(coding_agents.CODEX_BEGINNING)
        usages: list[Any] = []
        for _ in range(2):
            body = coding_agents.CODEX | {"input": history}
            reply = await post(client, RESPONSES, body, coding_agents.CODEX_HEADERS)
            assert reply.headers["x-session-id"] == coding_agents.CODEX_THREAD
            told = parsed(reply.content)
            final = checked(told)
            assert final["status"] == "completed"
            usages.append(final["usage"])
            done = [event["item"] for event in told[:-1] if event["type"] == "response.output_item.done"]
            history += [coding_agents.codex_says(item) for item in done]
            history += [
                {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
                for item in reversed(done)
                if item["type"] == "function_call"
            ]
        kinds = [item["type"] for item in history[len(coding_agents.CODEX_BEGINNING) :]]
        assert kinds[:4] == ["reasoning", "message", "function_call", "function_call"]
        first, second = usages
        cached = second["input_tokens_details"]["cached_tokens"]
        assert cached == first["input_tokens"] + first["output_tokens"]
        assert second["input_tokens"] - cached < 2 * (len(RESULT) + FRAMING)
        assert "apply_patch" not in shown(rig)
        one_lineage(rig, cached)


async def test_codex_goes_on_with_what_another_server_s_tools_did() -> None:
    """A thread that was begun elsewhere has items of kinds that this server does not offer."""
    theirs = [
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "s", "status": "completed", "action": {"type": "exec"}},
        {"type": "custom_tool_call", "call_id": "p", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "p", "output": "Done"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABnot-ours"},
    ]
    async with agent("Two files.") as (rig, client):
        body = coding_agents.CODEX | {"input": [*coding_agents.CODEX_BEGINNING, *theirs]}
        reply = await post(client, RESPONSES, body, coding_agents.CODEX_HEADERS)
        assert checked(parsed(reply.content))["output"][0]["content"][0]["text"] == "Two files."
        assert "not-ours" not in shown(rig)


# --- chat completions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "call"),
    [
        (coding_agents.OPENCODE, coding_agents.OPENCODE_HEADERS, hermes("bash", '{"command": "ls"}')),
        (coding_agents.CLINE, coding_agents.CLINE_HEADERS, hermes("execute_command", '{"command": "ls"}')),
    ],
    ids=["opencode", "cline"],
)
async def test_agents_that_call_tools_in_chat_completions(body: Any, headers: Any, call: str) -> None:
    async with agent(f"I look.\n{call}", f"Again.\n{call}", "Two files.") as (rig, client):
        messages = list(body["messages"])
        usages: list[Any] = []
        for _ in range(3):
            reply = await post(client, CHAT, body | {"messages": messages}, headers)
            message = joined(events(reply.content))
            usages.append(message["usage"])
            messages += coding_agents.answered(message, *[RESULT] * len(message["tool_calls"]))
        assert message["content"] == "Two files."
        if "x-session-id" in headers:
            assert reply.headers["x-session-id"] == headers["x-session-id"]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[1:]]
        for (before, after), known in zip(pairwise(usages), cached, strict=True):
            assert known == before["total_tokens"]
            assert after["prompt_tokens"] - known < len(RESULT) + FRAMING
        one_lineage(rig, *cached)


async def test_aider_which_calls_no_tools() -> None:
    """It sends no `stream_options`: what was computed shows in the session."""
    async with agent("x = 2", "y = 3") as (rig, client):
        messages = list(coding_agents.AIDER["messages"])
        sessions: list[str] = []
        for _ in range(2):
            body = coding_agents.AIDER | {"messages": messages}
            reply = await post(client, CHAT, body, coding_agents.AIDER_HEADERS)
            message = joined(events(reply.content))
            assert message["usage"] is None
            sessions.append(reply.headers["x-session-id"])
            messages += [*coding_agents.answered(message), {"role": "user", "content": "Now y."}]
        assert sessions[0] == sessions[1]
        usage = (await rig.session(sessions[0]))["usage"]
        prompts = [len(unpack_tokens(submit.tokens)) for submit in rig.engine.submits]
        assert usage["cached_tokens"] == prompts[0] + len("x = 2") + 1
        one_lineage(rig, usage["cached_tokens"])
