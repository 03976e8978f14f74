"""Tool calls that are not to be run, as text: the one place that says what becomes of them.

A turn that is cut within a call (by `max_tokens` or a stop string) hands its client what there is of
it, and clients keep that in their history, whoever made it. It can be no call of a prompt, for no
arguments can be rendered; it is shown to the model as what it is, the text it wrote, in its family's
form. (Where the session's own ids are spliced in, those are used, as everywhere.)

No call of such a turn waits for a result, the whole ones neither (`Outcome.handed`). So clients go on
with all of them, some or none, as they are or closed, answered or not: it is the same history. What names
a history (`shown` false) therefore has none of them, whatever the client sent of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from agentserve.text.conversation import RawMessage
from tools_bridge.call_syntax import HERMES, CallSyntax
from tools_bridge.cut_call import cut_call
from tools_bridge.json_value import JsonError, parse_arguments


def call_ids(message: RawMessage) -> list[str]:
    """The ids of a message's calls; the message need not have been checked."""
    return [id_ for call in _items(message) if (id_ := _id(call, "id")) is not None]


def told_as_text(
    messages: Sequence[RawMessage],
    cut: Collection[str],
    *,
    shown: bool = True,
    written: CallSyntax = HERMES,
) -> list[RawMessage]:
    """The messages, with unfinished calls put after their message's text, as `written` by the model's
    family. `cut`: the ids of calls that this server handed out and that are not to be run; if not `shown`,
    they are left out, and what answers them is a user's message.

    Such a call may be whole, or its client may have closed its half object (SDKs that parse streams do):
    it is text where something else than its result follows. A result for a call that is text answers no
    call any more and becomes a user's message, after the results of its neighbours. The messages need not
    have been checked.
    """
    told: list[RawMessage] = []
    late: list[RawMessage] = []
    gone: set[str] = set()  # calls of the last assistant message that became text
    for at, message in enumerate(messages):
        if message.get("role") == "tool":
            if (_id(message, "tool_call_id") or "") in gone:
                late.append({"role": "user", "content": message.get("content")})
            else:
                told.append(message)
            continue
        told += late
        late = []
        said = _items(message) if message.get("role") == "assistant" else []
        left = (_unanswered(messages, at, cut) if shown else cut) if said and cut else ()
        kept: list[Mapping[str, object]] = []
        texts: list[str] = []
        gone = set()
        for call in said:
            id_ = _id(call, "id") or ""
            if not _is_text(call, left=id_ in left):
                kept.append(call)
                continue
            gone.add(id_)
            if shown or id_ not in cut:
                texts.append(_text(call, written))
        if gone:
            message = _with(message, kept, texts)
            gone -= {_id(call, "id") or "" for call in kept}
        told.append(message)
    return told + late


def _unanswered(messages: Sequence[RawMessage], at: int, cut: Collection[str]) -> frozenset[str]:
    """Calls of `cut` that the message `at` has and that no result follows, though something does."""
    if at + 1 == len(messages):
        return frozenset()
    left = set(call_ids(messages[at])) & set(cut)
    for message in messages[at + 1 :] if left else ():
        if message.get("role") != "tool":
            break
        left.discard(_id(message, "tool_call_id") or "")
    return frozenset(left)


def _id(item: Mapping[str, object], key: str) -> str | None:
    value = item.get(key)
    return value if isinstance(value, str) else None


def _items(message: RawMessage) -> list[Mapping[str, object]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _is_text(call: Mapping[str, object], *, left: bool) -> bool:
    """`left`: it was not to be run, and was not. What is no call at all is left to the check."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return False
    arguments = function.get("arguments")
    if left:
        return arguments is None or isinstance(arguments, str | dict)
    return isinstance(arguments, str) and not _is_object(arguments)


def _is_object(arguments: str) -> bool:
    try:
        parse_arguments(arguments)
    except JsonError:
        return False
    return True


def _with(message: RawMessage, calls: Sequence[Mapping[str, object]], said: Sequence[str]) -> RawMessage:
    """The message with these calls alone, and more texts."""
    content = message.get("content")
    kept = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    texts = [{"type": "text", "text": text} for text in said]
    changed: dict[str, object] = {**message, "content": [*kept, *texts], "tool_calls": calls}
    if not calls:
        del changed["tool_calls"]
    return changed


def _text(call: Mapping[str, object], written: CallSyntax) -> str:
    """As the model wrote it, but for blanks."""
    function = call["function"]
    assert isinstance(function, dict)  # `_is_text` looked
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return cut_call(written, function["name"], arguments)
