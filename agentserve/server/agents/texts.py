"""What the model reads where a tool has no result of its own, and how its history is told."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agentserve.server.agents.history import History
from agentserve.server.agents.records import (
    Batch,
    CallItem,
    MessageItem,
    Output,
    OutputItem,
    ReasoningItem,
    UserItem,
)
from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.text_port import JsonObject

NO_RESULT = "No result: the call was cancelled."
STARTED = "The call runs in the background. Its result will follow."
TOO_LONG = "The tool's output is too long for the context. Ask for less."
BROKE = "The tool failed."
DENIED = "The user did not allow this call."
UNDECIDED = "Nobody allowed this call within {:g} s."
TOO_MANY = "The turn took {} model calls without an answer."
ELSEWHERE = "The session went on elsewhere, without this turn's tool results."


def timed_out(seconds: float) -> str:
    return f"The tool did not answer within {seconds:g} s."


def arguments_of(call: CallItem) -> object:
    """As JSON, not as text of it; the text where it is none."""
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments


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


def messages_of(history: History, held: Mapping[str, Output] | None = None) -> list[JsonObject]:
    """All that its session was told and said, from the items: for a session whose own messages had to go.
    A message that came to nothing is no part of it. `held`: results that are no items yet."""
    fresh = held or {}
    messages: list[JsonObject] = []
    outputs = history.outputs()
    calls = {item.call: item for item, _ in history.items() if isinstance(item, CallItem)}
    asked: list[JsonObject] = []
    turn = ""
    for batch in history.batches:
        if batch.turn != turn:
            turn, asked = batch.turn, []
        if batch.step is None:
            asked += [user_message(item) for item in batch.items if isinstance(item, UserItem)]
            continue
        late = [late_result(calls[call], outputs[call]) for call in batch.told]
        messages += [*asked, *late, _reply(batch)]
        asked = []
        for item in batch.items:
            if isinstance(item, CallItem) and item.whole:
                output = outputs.get(item.call)
                content = fresh[item.call] if output is None and item.call in fresh else _result(item, output)
                messages.append({"role": "tool", "tool_call_id": item.call, "content": content})
    return messages


def _reply(batch: Batch) -> JsonObject:
    text = "".join(item.text for item in batch.items if isinstance(item, MessageItem))
    thought = "".join(item.text for item in batch.items if isinstance(item, ReasoningItem))
    message: JsonObject = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    calls = [
        {"id": item.call, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        for item in batch.items
        if isinstance(item, CallItem) and item.whole
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _result(call: CallItem, output: OutputItem | None) -> object:
    if call.background:
        return STARTED
    return NO_RESULT if output is None else ToolOutcome(output.output or "", output.error).content
