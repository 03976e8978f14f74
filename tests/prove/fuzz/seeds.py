"""Valid requests of every dialect, from which mutations start. A route without one gets a body made from its
schema in the server's own `/openapi.json`, so that no route is left out."""

from __future__ import annotations

from typing import Any

SAY = "SAY:"  # the fuzzed worker says what comes behind it
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS},
}
FLAT = {"type": "function", "name": "weather", "description": "Weather.", "parameters": PARAMETERS}
MCP = {"type": "mcp", "server_label": "station", "server_url": "https://127.0.0.1:9/mcp"}
ASKED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


HISTORY = [
    {"role": "system", "content": "Be brief."},
    user("Weather in Oslo?"),
    {"role": "assistant", "content": None, "tool_calls": [ASKED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    user("And now?"),
]
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "stop": ["x", "yz"], "logit_bias": {"5": 1.0},
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "min_tokens": 1,
}  # fmt: skip
CHAT = {"model": "tiny", "max_tokens": 6}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
]
BLOCKS: list[dict[str, Any]] = [
    user("Weather?"),
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Rain."}]},
]
MESSAGES = {"model": "tiny", "max_tokens": 6}
AGENT = {"model": "tiny", "instructions": "Be brief.", "tools": [FLAT], "max_output_tokens": 6}
MESSAGE = {"type": "message", "role": "user", "content": f"{SAY}{CALL}"}
ENDPOINT = {
    "name": "hook",
    "url": "https://127.0.0.1:9/hook",
    "event_types": ["agent.session.action_required", "response.completed"],
}

SEEDS: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        CHAT | {"messages": [user("Hi")]},
        CHAT | {"messages": HISTORY, "stream": True, "stream_options": {"include_usage": True}},
        CHAT | {"messages": [user(f"{SAY}{CALL}")], "tools": [TOOL], "max_tokens": 90},
        CHAT | {"messages": [user("Hi")], "tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
        CHAT | {"messages": [user("Hi")], "response_format": FORMAT, "max_tokens": 40},
        CHAT | {"messages": [user("Hi")], "n": 2, "logprobs": True, "top_logprobs": 2, **SAMPLING},
        CHAT | {"messages": [user("Hi")], "session_id": "s1", "structured_outputs": {"regex": "[ab]+"}},
    ],
    "/v1/completions": [
        CHAT | {"prompt": "Once upon"},
        CHAT | {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1, "stream": True},
        CHAT | {"prompt": [[5, 6, 7], [8]], **SAMPLING},
    ],
    "/v1/messages": [
        MESSAGES | {"messages": [user("Hi")]},
        MESSAGES | {"messages": BLOCKS, "tools": [{"name": "weather", "input_schema": PARAMETERS}]},
        MESSAGES
        | {"messages": [user("Hi")], "system": [{"type": "text", "text": "Be brief."}], "stream": True},
        MESSAGES | {"messages": [user("Hi")], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ],
    "/v1/messages/count_tokens": [{"model": "tiny", "messages": BLOCKS}],
    "/v1/responses": [
        {"model": "tiny", "input": "Hi", "max_output_tokens": 16},
        {"model": "tiny", "input": ITEMS, "tools": [FLAT], "stream": True, "max_output_tokens": 16},
        {"model": "tiny", "input": "Hi", "background": True, "max_output_tokens": 16, "stream": True},
        {"model": "tiny", "input": f"{SAY}{CALL}", "tools": [FLAT], "store": True, "metadata": {"a": "b"}},
        {"model": "tiny", "input": "Hi", "text": {"format": {"type": "json_schema", "name": "a",
         "schema": PARAMETERS}}, "max_output_tokens": 40, "include": ["reasoning.encrypted_content"]},
    ],
    "/v1/responses/input_tokens": [{"model": "tiny", "input": ITEMS}],
    "/v1/conversations": [{"items": ITEMS[:1], "metadata": {"a": "b"}}],
    "/v1/conversations/{id}": [{"metadata": {"c": "d"}}],
    "/v1/conversations/{id}/items": [{"items": ITEMS}],
    "/tokenize": [{"model": "tiny", "prompt": "Hi"}, {"messages": HISTORY, "tools": [TOOL]}],
    "/detokenize": [{"model": "tiny", "tokens": [5, 6, 7]}],
    "/close_session": [{"session_id": "s1"}],
    "/agentserve/sessions/{name}/tool_results": [
        {"call_id": "call_1", "content": "Rain."},
        {"results": [{"call_id": "call_1", "content": [{"type": "text", "text": "x"}], "epoch": 0}]},
        {"results": [], "continue": True, "stream": True, "max_tokens": 6},
    ],
    "/agentserve/sessions/{name}/tool_results/{call_id}/stream": ["Rain, and \N{SNOWMAN}."],
    "/agentserve/sessions/{name}/fork": [{"at_turn": 1}, {}],
    "/agentserve/sessions/{name}/hints": [
        {"expected_wait": 3.0, "deadline": 9.0, "priority": 1, "final": False, "retain": 0.5},
        {"retain": [{"start": 0, "end": 64, "priority": 100}, {"start": 64, "priority": 5}]},
    ],
    "/v1/agents": [AGENT | {"name": "a", "metadata": {"a": "b"}}],
    "/v1/agents/{agent}": [AGENT],
    "/v1/agents/sessions": [
        {"environment": {"type": "none"}, "agent": AGENT},
        {"agent": AGENT, "input": [MESSAGE], "stream": True},
        {"agent": AGENT | {"tools": [FLAT, MCP]}, "input": f"{SAY}{CALL}"},
    ],
    "/v1/agents/sessions/{id}": [{"metadata": {"a": "b"}, "agent": {"max_output_tokens": 5}}],
    "/v1/agents/sessions/{id}/events": [
        {"events": [{"type": "agent.session.input.message", "input": [MESSAGE]}]},
        {"events": [{"type": "agent.session.input.cancel"}]},
        {"events": [{"type": "agent.session.input.tool_result", "turn_id": "t", "call_id": "c",
         "success": True, "output": "Rain."}]},
        {"events": [{"type": "agent.session.input.mcp_approval_request_result", "request_id": "r",
         "response": {"type": "mcp_tool_call", "decision": "approve"}}]},
    ],
    "/v1/webhook_endpoints": [ENDPOINT, ENDPOINT | {"payload": "full"}],
    "/v1/webhook_endpoints/{id}": [{"name": "other", "payload": "thin"}],
    "/v1/webhook_endpoints/{id}/rotate_secret": [{"keep_old_secret_active_for_24_hours": True}],
    "/v1/webhook_endpoints/{id}/test": [{"event_type": "response.completed"}],
}  # fmt: skip
