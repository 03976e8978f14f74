"""Ids of calls as Kimi K2's models write them: `functions.NAME:N`, N counting the conversation's calls.

Its template shows a call by its id alone and a result by the id that it answers, so a model that reads
other ids finds neither the name of what was called nor which result is whose.
Source: Moonshot's guide to tool calls beside the weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from agentserve.text.conversation import Message

_NATIVE = re.compile(r"functions\.[^:]+:\d+")


def numbered(messages: Sequence[Message]) -> list[Message]:
    """The conversation with such ids. Those that have the form already are kept."""
    out: list[Message] = []
    count = 0
    known: dict[str, str] = {}
    for message in messages:
        if message.calls:
            calls = []
            for call in message.calls:
                known[call.id] = call.id if _NATIVE.fullmatch(call.id) else f"functions.{call.name}:{count}"
                calls.append(replace(call, id=known[call.id]))
                count += 1
            message = replace(message, calls=tuple(calls))
        elif message.call_id is not None:
            message = replace(message, call_id=known.get(message.call_id, message.call_id))
        out.append(message)
    return out
