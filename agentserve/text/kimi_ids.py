"""Ids of calls as Kimi K2's models write them: `functions.NAME:N`, N counting the conversation's calls.

Its template shows a call by its id alone and a result by the id that it answers, so a model that reads
other ids finds neither the name of what was called nor which result is whose.
Source: Moonshot's guide to tool calls beside the weights.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from agentserve.text.conversation import Call, Message

BEGIN, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_NATIVE = re.compile(r"functions\.[^:]+:[0-9]{1,9}")
_NOTHING: Mapping[int, Sequence[str]] = {}


def numbered(messages: Sequence[Message], written: Mapping[int, Sequence[str]] = _NOTHING) -> list[Message]:
    """The conversation with such ids: those that the model has written in a message (by its index), those
    that have the form already, and others in the order of the calls."""
    out: list[Message] = []
    count = 0
    known: dict[str, str] = {}
    for index, message in enumerate(messages):
        if message.calls:
            ids = written.get(index, ())
            if not _are_of(ids, message.calls):
                ids = _given(message.calls, count)
            known |= {call.id: id_ for call, id_ in zip(message.calls, ids, strict=True)}
            calls = (replace(call, id=id_) for call, id_ in zip(message.calls, ids, strict=True))
            message = replace(message, calls=tuple(calls))
            count = max(count + len(ids), *(_number(id_) + 1 for id_ in ids))  # some may have been cut away
        elif message.call_id is not None:
            message = replace(message, call_id=known.get(message.call_id, message.call_id))
        out.append(message)
    return out


def _given(calls: Sequence[Call], first: int) -> list[str]:
    """Ids for calls that the model has not written: their own, or numbers that no other of them has."""
    taken = {_number(call.id) for call in calls if _NATIVE.fullmatch(call.id)}
    free = (number for number in itertools.count(first) if number not in taken)
    return [
        call.id if _NATIVE.fullmatch(call.id) else f"functions.{call.name}:{next(free)}" for call in calls
    ]


def _number(id_: str) -> int:
    return int(id_.rpartition(":")[2])


def _are_of(ids: Sequence[str], calls: Sequence[Call]) -> bool:
    return len(ids) == len(calls) and all(
        _NATIVE.fullmatch(id_) and id_.startswith(f"functions.{call.name}:")
        for id_, call in zip(ids, calls, strict=True)
    )


def in_tokens(
    ids: Sequence[int], control: Mapping[str, int], decode: Callable[[Iterable[int]], str]
) -> list[str]:
    """The ids of calls in a turn's tokens: each stands between two control tokens, so arguments, which may
    be long, are not decoded."""
    begin, end = control.get(BEGIN), control.get(ARGUMENTS)
    if begin is None or end is None:
        return []
    return [decode(ids[start:stop]).strip() for start, stop in _between(list(ids), begin, end)]


def _between(ids: list[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    at = 0
    try:
        while True:
            start = ids.index(begin, at) + 1
            at = ids.index(end, start)
            yield start, at
    except ValueError:  # no more of them
        return
