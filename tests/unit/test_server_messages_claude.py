"""Claude Code, as its requests look: a nonce in each, and tools that it finds later."""

from __future__ import annotations

import json
from typing import Any

from agentserve.messages import unpack_tokens
from tests import claude_code
from tests.anthropic_client import frames, put_together
from tests.api_rig import Rig, hermes
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import usage_before


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
