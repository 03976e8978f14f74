"""What the model reads where a tool has no result of its own, and how its history is told."""

from __future__ import annotations

from agentserve.server.agents.records import CallItem, OutputItem, UserItem
from agentserve.server.text_port import JsonObject

STARTED = "The call runs in the background. Its result will follow."
TOO_LONG = "The tool's output is too long for the context. Ask for less."
BROKE = "The tool failed."
TOO_MANY = "The turn took {} model calls without an answer."
ELSEWHERE = "The session went on elsewhere, without this turn's tool results."


def timed_out(seconds: float) -> str:
    return f"The tool did not answer within {seconds:g} s."


def user_message(item: UserItem) -> JsonObject:
    if len(item.texts) == 1:
        return {"role": "user", "content": item.texts[0]}
    return {"role": "user", "content": [{"type": "text", "text": text} for text in item.texts]}


def late_result(call: CallItem, output: OutputItem) -> JsonObject:
    """The result of a background call: its tool message was that it runs."""
    content = output.output
    if output.error is not None:
        content = f"Error: {output.error}"
    elif isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    return {
        "role": "user",
        "content": f"[Result of the background call {call.call} ({call.name})]\n{content}",
    }
