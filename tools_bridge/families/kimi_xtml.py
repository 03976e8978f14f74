"""The replies of Kimi K3: elements of control tokens, one of which the prompt has opened.

reasoning<|close|>think<|sep|><|open|>response<|sep|>content<|close|>response<|sep|><|open|>tools<|sep|>
<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>
<|close|>call<|sep|><|close|>tools<|sep|>

Calls that nobody asked for are no content either: they are dropped, as is what stands beside calls in
`tools`.
"""

from __future__ import annotations

from tools_bridge.parser import MAX_NAME, Asked, Program, Rest, give_up
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step, drop
from tools_bridge.typed import Fields, Sure, attributes

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
MARKERS = (OPEN, CLOSE, SEPARATOR)
MAX_TAG = 2 * MAX_NAME
_TAGS = Marks(OPEN, CLOSE)
_TAG_END = Marks(SEPARATOR, OPEN, CLOSE)
_VALUE = f"{CLOSE}argument{SEPARATOR}"
_VALUE_END = Marks(_VALUE)
_SURE = Sure(_VALUE, (OPEN, CLOSE))
_CALL, _CALL_END = f"{OPEN}call ", f"{CLOSE}call{SEPARATOR}"
_REST = Rest((_CALL_END,), (_CALL,))
_ENTIRE = Marks(_CALL_END, _CALL)


def kimi_xtml(asked: Asked) -> Program:
    def program(source: Source, reply: Reply) -> Step[None]:
        section = False  # among calls: what is there beside them is dropped
        if asked.inside:
            reply.think()
        while mark := (yield from source.until(_TAGS, drop if section else reply.say)):
            tag, end = yield from _tag(source)
            if not end:
                if not section or source.stops_in():
                    give_up(source, reply, mark + tag)
                continue
            word = tag.split(maxsplit=1)[0] if tag.strip() else ""
            if reply.thinking:
                reply.end_thinking()
            if word == "think":
                section = False
                if mark == OPEN:
                    reply.think()
            elif mark == OPEN and word == "call":
                while tag:
                    tag = yield from _call(source, reply, tag, asked)
                section = reply.called or not asked.calls
            elif word == "argument" and not section:
                reply.say(mark + tag + end)  # of no call
            elif word in ("tools", "response"):
                section = mark == OPEN and word == "tools"

    return program


def _call(source: Source, reply: Reply, tag: str, asked: Asked) -> Step[str]:
    """Read a call behind its `tag`. Where another one begins before it has ended: the tag of that."""
    if not asked.calls:
        yield from _REST.skip(source)
        return ""
    name = _attributes(tag).get("tool")
    if not name:  # none after all: told as it was written
        reply.say(OPEN + tag + SEPARATOR)
        yield from source.before(_ENTIRE, reply.say)
        reply.say((yield from source.accept(_CALL_END)))
        return ""
    reply.open(name)
    fields = Fields(reply, asked.tools.get(name))
    junk: list[str] = []
    while True:
        mark = yield from source.until(_TAGS, junk.append)
        tag, end = (yield from _tag(source)) if mark else ("", "")
        if not end and source.stops_in():
            reply.close("truncated")
            return ""
        given = _attributes(tag)
        if mark == CLOSE or not (end and tag.startswith("argument") and "key" in given):
            break
        kinds = frozenset({given.get("type", "string")})
        if not (yield from fields.read(source, given["key"], _VALUE_END, kinds=kinds, sure=_SURE)):
            reply.close("truncated")
            return ""
    if mark + tag + end == _CALL_END:
        fields.end()
        reply.close("malformed" if fields.twice or "".join(junk).strip() else "")
        return ""
    following = tag if mark == OPEN and end and tag.startswith("call ") else ""
    if not following:
        yield from _REST.skip(source)
    reply.close("malformed")
    return following


def _tag(source: Source) -> Step[tuple[str, str]]:
    """Read on to the end of a tag: what is in it, and its end mark; where it has none, ""."""
    tag, end = yield from source.upto(_TAG_END, MAX_TAG)
    if end != SEPARATOR:
        source.at -= len(end)
    return tag, end if end == SEPARATOR else ""


def _attributes(tag: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in attributes(tag).items()}
