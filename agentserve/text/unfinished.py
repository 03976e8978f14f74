"""Tool calls whose arguments are no JSON object, as text.

A turn that is cut within a call (by `max_tokens` or a stop string) hands its client what there is of
it, and clients keep that in their history, whoever made it. It can be no call of a prompt, for no
arguments can be rendered; it is shown to the model as what it is, the text it wrote, in its family's
form. (Where the session's own ids are spliced in, those are used, as everywhere.)
"""

from __future__ import annotations

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
    family. If not `shown`, those with an id of `cut`, which this server handed out so, are left out.

    A client may have closed the half object of such a call (SDKs that parse streams do); then nobody ran
    it, and it is one too where something else than its result follows. A result for such a call answers no
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
        left = _unanswered(messages, at, cut) if said and cut else frozenset()
        broken = [
            call
            for call in said
            if (arguments := _arguments(call)) is not None
            and (_id(call, "id") in left or not _is_object(arguments))
        ]
        whole = {_id(call, "id") or "" for call in said if call not in broken}
        gone = {_id(call, "id") or "" for call in broken} - whole
        if broken:
            texts = [_text(call, written) for call in broken if shown or _id(call, "id") not in cut]
            message = _without(message, broken, texts)
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


def _arguments(call: Mapping[str, object]) -> str | None:
    """None where it is left to the check."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return None
    arguments = function.get("arguments")
    return arguments if isinstance(arguments, str) else None


def _is_object(arguments: str) -> bool:
    try:
        parse_arguments(arguments)
    except JsonError:
        return False
    return True


def _without(message: RawMessage, broken: Sequence[Mapping[str, object]], said: Sequence[str]) -> RawMessage:
    content = message.get("content")
    kept = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    rest = [call for call in _items(message) if call not in broken]
    texts = [{"type": "text", "text": text} for text in said]
    changed: dict[str, object] = {**message, "content": [*kept, *texts], "tool_calls": rest}
    if not rest:
        del changed["tool_calls"]
    return changed


def _text(call: Mapping[str, object], written: CallSyntax) -> str:
    """As the model wrote it, but for blanks."""
    function = call["function"]
    assert isinstance(function, dict)  # `_arguments` looked
    return cut_call(written, function["name"], function["arguments"])
