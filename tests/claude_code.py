"""Requests as Claude Code 2.1.332 sends them to a gateway: their shape, with made-up words.

In each the first system block may have another number, a system message follows the first user message
(as blocks while it is the last, then as a string), the cache marks move to the latest message, and the
list of tools grows in its middle by those that a tool search has found.
"""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages?beta=true"
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-tool-changes-2026-07-01,advanced-tool-use-2025-11-20,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.332 (external, sdk-cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "fdf58316-659d-48f6-b858-279db273079f",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "content-type": "application/json",
}
MARK = {"type": "ephemeral"}
REMINDER = "<system-reminder>\nThe task list is empty. Do not mention this to the user.\n</system-reminder>"
ENVIRONMENT = "# Environment\n - Platform: linux\n\nThese tools are deferred: CronList, NotebookEdit"


def _tool(name: str, deferred: bool = False, **properties: str) -> dict[str, Any]:
    tool: dict[str, Any] = {
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
    return tool | ({"defer_loading": True} if deferred else {})


TOOLS = [
    _tool("Bash", command="string", timeout="number"),
    _tool("Read", file_path="string"),
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    _tool("ToolSearch", query="string"),
    _tool("DeferredToolPlaceholder", deferred=True),
    _tool("Write", file_path="string", content="string"),
]
MORE_TOOLS = [
    TOOLS[0],
    _tool("CronList", deferred=True),
    _tool("NotebookEdit", deferred=True, cell="string"),
    *TOOLS[1:],
]
FOUND = [
    {"type": "tool_reference", "tool_name": "NotebookEdit"},
    {"type": "tool_reference", "tool_name": "CronList"},
]


def body(nonce: str, *turns: Any, **more: Any) -> dict[str, Any]:
    """A request; `turns` follow the first question. The last message carries a cache mark."""
    first = [{"type": "text", "text": REMINDER}, {"type": "text", "text": "What is in README.md?"}]
    environment = ENVIRONMENT if turns else [{"type": "text", "text": ENVIRONMENT}]
    messages: list[Any] = [{"role": "user", "content": first}, {"role": "system", "content": environment}]
    messages += turns
    last = dict(messages[-1])
    last["content"] = [*last["content"][:-1], last["content"][-1] | {"cache_control": MARK}]
    return {
        "model": "tiny",
        "messages": [*messages[:-1], last],
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=cli; cch={nonce};",
            },
            {"type": "text", "text": "You are Claude Code, a command line tool.", "cache_control": MARK},
            {"type": "text", "text": "\nYou are an agent that helps with code. " * 8, "cache_control": MARK},
        ],
        "tools": TOOLS,
        "metadata": {"user_id": '{"device_id":"7842","account_uuid":"","session_id":"fdf58316"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **more,
    }
