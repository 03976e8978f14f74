"""The replies of Kimi K3: elements of control tokens, one of which the prompt has opened.

reasoning<|close|>think<|sep|><|open|>response<|sep|>content<|close|>response<|sep|><|open|>tools<|sep|>
<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>
<|close|>call<|sep|><|close|>tools<|sep|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tools_bridge.parser import MAX_NAME, Asked, Program, give_up
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step, drop
from tools_bridge.typed import Fields, Sure

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
MARKERS = (OPEN, CLOSE, SEPARATOR)
MAX_TAG = 2 * MAX_NAME
_TAGS = Marks(OPEN, CLOSE)
_TAG_END = Marks(SEPARATOR)
_VALUE = f"{CLOSE}argument{SEPARATOR}"
_VALUE_END = Marks(_VALUE)
_SURE = Sure(_VALUE, (OPEN, CLOSE))
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def kimi_xtml(asked: Asked) -> Program:
    def program(source: Source, reply: Reply) -> Step[None]:
        sink: Callable[[str], None] = reply.say
        if asked.inside:
            reply.think()
        while mark := (yield from source.until(_TAGS, sink)):
            tag, end = yield from source.upto(_TAG_END, MAX_TAG)
            if not end:
                give_up(source, reply, mark + tag)
                continue
            sink = reply.say
            word = tag.split(maxsplit=1)[0] if tag.strip() else ""
            if reply.thinking:
                reply.end_thinking()
            if word == "think":
                if mark == OPEN:
                    reply.think()
            elif mark == OPEN and word == "call":
                yield from _call(source, reply, tag, asked)
                sink = drop
            elif mark == CLOSE or word == "tools":
                sink = drop

    return program


def _call(source: Source, reply: Reply, tag: str, asked: Asked) -> Step[None]:
    name = _attributes(tag).get("tool")
    if not name or not asked.calls:
        return
    reply.open(name)
    fields = Fields(reply, asked.tools.get(name))
    junk: list[str] = []
    while True:
        mark = yield from source.until(_TAGS, junk.append)
        tag, end = (yield from source.upto(_TAG_END, MAX_TAG)) if mark else ("", "")
        if not end:
            return reply.close("truncated" if source.stops_in() else "malformed")
        if mark == CLOSE or not tag.startswith("argument"):
            break
        attributes = _attributes(tag)
        kinds = frozenset({attributes.get("type", "string")})
        if not (
            yield from fields.read(source, attributes.get("key", ""), _VALUE_END, kinds=kinds, sure=_SURE)
        ):
            return reply.close("truncated")
    fields.end()
    wrong = mark == OPEN or fields.twice or "".join(junk).strip()
    reply.close("malformed" if wrong else "")


def _attributes(tag: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(tag)}
