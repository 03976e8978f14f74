"""Requests in the shape that coding agents send them in, whole, with made-up words.

Claude Code's are in `claude_code.py`. Codex (0.142, responses) keeps its history itself: `store` is false,
items come back without ids and status, reasoning as it was packed. OpenCode goes through the AI SDK's
openai-compatible provider, Cline through the openai SDK, Aider through litellm, without tools: it edits by
what the answer says. Sources: the agents' own (codex-rs/codex-api `common.rs`, opencode `session/llm`, cline
`api/providers/openai.ts`).
"""

from __future__ import annotations

from typing import Any

CODEX_THREAD = "7c9b8f2e-0000-4c00-8000-000000000002"
CODEX_HEADERS = {
    "authorization": "Bearer none",
    "content-type": "application/json",
    "accept": "text/event-stream",
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.142.5 (Debian 12; x86_64) xterm-256color",
    "session-id": "7c9b8f2e-0000-4c00-8000-000000000001",
    "thread-id": CODEX_THREAD,
    "session_id": "7c9b8f2e-0000-4c00-8000-000000000001",  # as older ones had it
    "conversation_id": CODEX_THREAD,
    "version": "0.142.5",
    "x-codex-installation-id": "9c1a2b3c-0000-4c00-8000-000000000003",
    "x-codex-turn-metadata": '{"turn_id":"1","request_kind":"turn"}',
    "x-codex-beta-features": "multi_agent",
}

_PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: /[^\\n]+/ LF
%import common.LF
"""

CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent that runs in a terminal. " * 20,
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command in a PTY.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {
                    "cmd": {"type": "string", "description": "Shell command."},
                    "workdir": {"type": "string"},
                    "yield_time_ms": {"type": "number"},
                },
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files. This is a FREEFORM tool, so do not wrap the patch in JSON.",
            "format": {"type": "grammar", "syntax": "lark", "definition": _PATCH},
        },
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False, "search_context_size": "low"},
        {"type": "image_generation", "output_format": "png"},
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Tools of a server.",
            "tools": [
                {"type": "function", "name": "list", "strict": False, "parameters": {"type": "object"}}
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": CODEX_THREAD,
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "9c1a2b3c", "thread_id": CODEX_THREAD},
}

CODEX_BEGINNING: list[Any] = [
    {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "<permissions instructions>\nread only"}],
    },
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "# AGENTS.md instructions\n\n<INSTRUCTIONS>\nBe brief."},
            {
                "type": "input_text",
                "text": "<environment_context>\n  <cwd>/src</cwd>\n</environment_context>",
            },
        ],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is here?"}]},
]


def codex_says(item: dict[str, Any]) -> dict[str, Any]:
    """An item of a response as it comes back in the next request."""
    kept = {name: value for name, value in item.items() if name not in ("id", "status")}
    if item["type"] == "reasoning":  # it is known by what was packed
        kept = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    return kept


def _tool(name: str, **properties: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} for the agent. " * 3,
            "parameters": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {key: {"type": kind, "description": key} for key, kind in properties.items()},
                "required": list(properties)[:1],
                "additionalProperties": False,
            },
        },
    }


OPENCODE_HEADERS = {
    "authorization": "Bearer none",
    "content-type": "application/json",
    "user-agent": "opencode/1.0.207 ai-sdk/openai-compatible/2.0.4 runtime/bun/1.3.5",
    "x-session-affinity": "ses_4f2a9b7c1ffeQ3",
    "x-session-id": "ses_4f2a9b7c1ffeQ3",
}

OPENCODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32000,
    "temperature": 0.55,
    "top_p": 1,
    "messages": [
        {"role": "system", "content": "You are opencode, an agent that edits code. " * 10},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "here?"}]},
    ],
    "tools": [_tool("bash", command="string", timeout="number"), _tool("read", filePath="string")],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}

CLINE_HEADERS = {
    "authorization": "Bearer none",
    "content-type": "application/json",
    "user-agent": "Cline/3.38.1",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
}

CLINE: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "You are Cline, a skilled engineer. " * 12},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>\nWhat is here?\n</task>"},
                {
                    "type": "text",
                    "text": "<environment_details>\n# Current Time\n12:00\n</environment_details>",
                },
            ],
        },
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [_tool("execute_command", command="string"), _tool("read_file", path="string")],
}

AIDER_HEADERS = {
    "authorization": "Bearer none",
    "content-type": "application/json",
    "user-agent": "litellm/1.80.0",
}

AIDER: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Act as an expert developer. Answer with SEARCH/REPLACE blocks. " * 8},
        {"role": "user", "content": "I have *added these files to the chat*:\n\na.py\n```\nx = 1\n```"},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
        {"role": "user", "content": "Set x to 2."},
    ],
    "temperature": 0,
    "stream": True,
}


def answered(message: dict[str, Any], *results: Any) -> list[dict[str, Any]]:
    """What a client of chat completions appends: the streamed message, and its calls' results."""
    said: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if message["tool_calls"]:
        said["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"} for call in message["tool_calls"]
        ]
    calls = message["tool_calls"]
    return [
        said,
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ),
    ]
