"""Requests as Claude Code sends them to a gateway: their shape, with made-up words.

In each the first system block has another number, the betas are many, the cache marks move to the
latest message, and tools of Anthropic's servers stand among those that the client runs.
"""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages?beta=true"
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.36 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "content-type": "application/json",
}
MARK = {"type": "ephemeral", "ttl": "1h"}
REMINDER = "<system-reminder>\nThe task list is empty. Do not mention this to the user.\n</system-reminder>"


def _tool(name: str, **properties: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"{name} for the agent. " * 4,
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {key: {"type": kind, "description": key} for key, kind in properties.items()},
            "required": list(properties),
            "additionalProperties": False,
        },
    }


TOOLS = [
    _tool("Bash", command="string", timeout="number"),
    _tool("Read", file_path="string"),
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    _tool("mcp__notes__find", query="string"),
]


def body(nonce: str, *turns: Any, **more: Any) -> dict[str, Any]:
    """A request; `turns` follow the first user message. The last one carries the cache mark."""
    first = [{"type": "text", "text": REMINDER}, {"type": "text", "text": "What is in README.md?"}]
    messages: list[Any] = [{"role": "user", "content": first}, *turns]
    last = dict(messages[-1])
    last["content"] = [*last["content"][:-1], last["content"][-1] | {"cache_control": MARK}]
    return {
        "model": "tiny",
        "messages": [*messages[:-1], last],
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.36.d1f; cc_entrypoint=cli; cch={nonce};",
            },
            {"type": "text", "text": "You are Claude Code, a command line tool.", "cache_control": MARK},
            {"type": "text", "text": "You are an agent that helps with code. " * 8, "cache_control": MARK},
        ],
        "tools": TOOLS,
        "metadata": {"user_id": "user_0a1b_account__session_5f2c6a52-6d0f-4a52-9d7a-1f2d3c4b5a69"},
        "max_tokens": 32000,
        "temperature": 1,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **more,
    }
