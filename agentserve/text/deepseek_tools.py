"""Tools told to DeepSeek's models, whose templates render calls and results but not what can be called.

For V3.1 the model card publishes the text that stands behind the system prompt; V3 and R1, which publish
none, get the same with their own form of calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from agentserve.text.conversation import Message
from tools_bridge.json_value import Json

_V31_CALL = "tool_call_name<｜tool▁sep｜>tool_call_arguments"
_V3_CALL = "function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```"
CALLS = {
    "deepseek-v3": (_V3_CALL, "put a newline between them"),
    "deepseek-v31": (_V31_CALL, "chain them directly without separators or spaces"),
}
"""By family: how a call is written, and what stands between several."""


def told(messages: Sequence[Message], tools: Sequence[Json], family: str) -> list[Message]:
    """The conversation with `tools` told at the end of its system text. `family`: one of CALLS."""
    described = describe(tools, family)
    if not messages or messages[0].role != "system":
        return [Message("system", (described,)), *messages]
    text = f"{messages[0].text}\n\n{described}" if messages[0].text else described
    return [replace(messages[0], parts=(text,)), *messages[1:]]


def describe(tools: Sequence[Json], family: str) -> str:
    call, several = CALLS[family]
    return (
        "## Tools\nYou have access to the following tools:\n\n"
        + "".join(map(_one, tools))
        + "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
        "{additional_tool_calls}<｜tool▁calls▁end｜>\n\n"
        "Where:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        f"- For multiple tool calls, {several}"
    )


def _one(tool: Json) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    function = function if isinstance(function, dict) else {}
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return (
        f"### {function.get('name', '')}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {parameters}\n\n"
    )
