"""Messages whose role a template does not take where they stand, as messages that it takes.

They stay in their place, so that the prompt only grows from turn to turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentserve.text.conversation import Message


def late_system_into_user(messages: Sequence[Message], *, consecutive_users: bool) -> list[Message]:
    """System messages that are not the first become user messages. Where the template refuses
    `consecutive_users`, those beside each other become one."""
    if not any(message.role == "system" for message in messages[1:]):
        return list(messages)
    told: list[Message] = []
    for message in messages:
        if message.role == "system" and told:
            message = replace(message, role="user")
        if told and message.role == told[-1].role == "user" and not consecutive_users:
            message = _joined(told.pop(), message)
        told.append(message)
    return told


def users_joined(messages: Sequence[Message]) -> list[Message]:
    """Users' messages beside each other become one: a client may send two, and an agent's server tells what
    its user and its background tools say at once."""
    told: list[Message] = []
    for message in messages:
        if told and message.role == told[-1].role == "user":
            message = _joined(told.pop(), message)
        told.append(message)
    return told


def without_empty_replies(messages: Sequence[Message], *, shows_reasoning: bool) -> list[Message]:
    """A model may end its turn at once. What it thought before is something to be shown, where it is."""
    return [
        message
        for message in messages
        if message.role != "assistant"
        or message.text
        or message.calls
        or (shows_reasoning and message.reasoning)
    ]


def user_into_tool(messages: Sequence[Message]) -> list[Message]:
    """What a user says right after tool results ends the last of them."""
    told: list[Message] = []
    for message in messages:
        if told and message.role == "user" and told[-1].role == "tool":
            message = _joined(told.pop(), message)
        told.append(message)
    return told


def results_with_names(messages: Sequence[Message]) -> list[Message]:
    """Tool results that do not say what was called, which clients may leave out, say so."""
    names = {call.id: call.name for message in messages for call in message.calls}
    return [
        replace(message, name=names.get(message.call_id))
        if message.role == "tool" and message.name is None and message.call_id is not None
        else message
        for message in messages
    ]


def _joined(first: Message, second: Message) -> Message:
    text = "\n\n".join(message.text for message in (first, second) if message.text)
    return replace(first, parts=(text,) if text else ())
