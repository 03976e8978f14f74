"""Tool calls of DeepSeek V3.2 and later. Versions differ in the outer word and in a blank:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="key" string="true">text</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

`string` says whether a value is text as it is, or JSON.
"""

from __future__ import annotations

import re

from tools_bridge.parser import MAX_NAME, Asked, give_up
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step, drop
from tools_bridge.typed import ANY, TEXT, Fields

_TAG, _END_TAG = "<｜DSML｜", "</｜DSML｜"
_OUTER = ("function_calls>", "tool_calls>", "calls>")
_OPENINGS = tuple(f"{_TAG}{blank}{word}" for blank in ("", " ") for word in _OUTER)
_ENDS = tuple(f"{_END_TAG}{blank}{word}" for blank in ("", " ") for word in _OUTER)
_INVOKES = tuple(f"{_TAG}{blank}invoke" for blank in ("", " "))
_INVOKE_ENDS = tuple(f"{_END_TAG}{blank}invoke>" for blank in ("", " "))
_PARAMETERS = tuple(f"{_TAG}{blank}parameter" for blank in ("", " "))
_VALUE_END = Marks(*(f"{_END_TAG}{blank}parameter>" for blank in ("", " ")))
_INSIDE = Marks(*_PARAMETERS, *_INVOKE_ENDS, *_ENDS)
_REST = Marks(*_INVOKE_ENDS, *_ENDS)
MARKERS: tuple[str, ...] = ()  # the tag's bar may be a token, but it is always shown
_TAG_END = Marks(">")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class DsmlCalls:
    triggers: tuple[str, ...] = _OPENINGS
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        before = trigger + (yield from source.blanks())
        mark = yield from source.accept(*_INVOKES, *_ENDS)
        if not mark:
            return give_up(source, reply, before, *_INVOKES)
        while mark in _INVOKES:
            opened = yield from self._invoke(source, reply, before + mark, asked)
            if not opened:
                return
            yield from source.blanks()
            mark = yield from source.accept(*_INVOKES, *_ENDS)
            before = ""

    def _invoke(self, source: Source, reply: Reply, before: str, asked: Asked) -> Step[bool]:
        raw, mark = yield from source.upto(_TAG_END, MAX_NAME)
        name = dict(_ATTRIBUTE.findall(raw)).get("name")
        if not mark or not name:
            give_up(source, reply, before + raw + mark)
            return False
        reply.open(name)
        fields = Fields(reply, asked.tools.get(name))
        if raw.endswith("/"):
            fields.end()
            reply.close()
            return True
        error = yield from self._arguments(source, fields)
        if error == "malformed":
            yield from source.until(_REST, drop)
        reply.close(error)
        return True

    def _arguments(self, source: Source, fields: Fields) -> Step[str]:
        junk: list[str] = []
        mark = yield from source.until(_INSIDE, junk.append)
        while mark in _PARAMETERS:
            raw, mark = yield from source.upto(_TAG_END, MAX_NAME)
            attributes = dict(_ATTRIBUTE.findall(raw))
            if not mark:
                return "truncated" if source.stops_in() else "malformed"
            if "name" not in attributes:
                return "malformed"
            kinds = TEXT if attributes.get("string") == "true" else ANY
            mark = yield from fields.read(source, attributes["name"], _VALUE_END, kinds=kinds)
            if mark:
                mark = yield from source.until(_INSIDE, junk.append)
        if not mark:
            return "truncated"
        if mark in _ENDS:  # the invocation was not closed
            source.at -= len(mark)
        fields.end()
        return "malformed" if fields.twice or "".join(junk).strip() else ""
