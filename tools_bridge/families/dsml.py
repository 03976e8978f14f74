"""Tool calls of DeepSeek V3.2 and later. Versions differ in the outer word and in a blank:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="key" string="true">text</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

`string` says whether a value is text as it is, or JSON.
"""

from __future__ import annotations

from tools_bridge.parser import MAX_NAME, Asked, Rest, give_up
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step
from tools_bridge.typed import ANY, TEXT, Fields, attributes

_TAG, _END_TAG = "<｜DSML｜", "</｜DSML｜"
_OUTER = ("function_calls>", "tool_calls>", "calls>")
_OPENINGS = tuple(f"{_TAG}{blank}{word}" for blank in ("", " ") for word in _OUTER)
_ENDS = tuple(f"{_END_TAG}{blank}{word}" for blank in ("", " ") for word in _OUTER)
_INVOKES = tuple(f"{_TAG}{blank}invoke" for blank in ("", " "))
_INVOKE_ENDS = tuple(f"{_END_TAG}{blank}invoke>" for blank in ("", " "))
_PARAMETERS = tuple(f"{_TAG}{blank}parameter" for blank in ("", " "))
_PARAMETER_ENDS = tuple(f"{_END_TAG}{blank}parameter>" for blank in ("", " "))
_VALUE_END = Marks(*_PARAMETER_ENDS)
_OTHERS = (*_OPENINGS, *_INVOKES)
_INSIDE = Marks(*_PARAMETERS, *_INVOKE_ENDS, *_ENDS, *_OTHERS)
_REST = Rest(_INVOKE_ENDS, (*_ENDS, *_OTHERS))
MARKERS: tuple[str, ...] = ()  # the tag's bar may be a token, but it is always shown
_TAG_END = Marks(">")


class DsmlCalls:
    triggers: tuple[str, ...] = _OPENINGS
    closers: tuple[str, ...] = (*_PARAMETER_ENDS, *_INVOKE_ENDS, *_ENDS)
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
        name = attributes(raw).get("name")
        if not mark or not name:
            give_up(source, reply, before + raw + mark)
            return False
        reply.open(name)
        fields = Fields(reply, asked.tools.get(name))
        if raw.endswith("/"):
            fields.end()
            reply.close()
            return True
        error, whole = yield from self._arguments(source, fields)
        if error and not whole:
            yield from _REST.skip(source)
        reply.close(error)
        return True

    def _arguments(self, source: Source, fields: Fields) -> Step[tuple[str, bool]]:
        """Read the parameters up to the end of the call; what is wrong with them, and whether the end was
        reached."""
        junk: list[str] = []
        mark = yield from source.until(_INSIDE, junk.append)
        while mark in _PARAMETERS:
            raw, mark = yield from source.upto(_TAG_END, MAX_NAME)
            given = attributes(raw)
            if not mark:
                return "truncated" if source.stops_in() else "malformed", False
            if "name" not in given:
                return "malformed", False
            kinds = TEXT if given.get("string") == "true" else ANY
            mark = yield from fields.read(source, given["name"], _VALUE_END, kinds=kinds)
            if mark:
                mark = yield from source.until(_INSIDE, junk.append)
        if not mark:
            return "truncated", False
        if mark not in _INVOKE_ENDS:  # the invocation was not closed
            source.at -= len(mark)
        if mark in _OTHERS:  # another one begins: this one may have gone on
            return "malformed", True
        fields.end()
        return "malformed" if fields.twice or "".join(junk).strip() else "", True
