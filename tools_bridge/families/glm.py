"""Tool calls of GLM 4.5 and later. Newlines between the parts come and go with the version:

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

A string is written as it is, all other values as JSON: they are read by the tool's schema.
"""

from __future__ import annotations

from tools_bridge.parser import MAX_NAME, Asked, Rest, give_up, is_name
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step
from tools_bridge.typed import Fields, Sure

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME_END = Marks(_KEY, CLOSE, OPEN, "\n")
_INSIDE = Marks(_KEY, CLOSE, OPEN)
_AFTER_KEY = Marks(_KEY_END, _VALUE, CLOSE, OPEN)
_REST = Rest((CLOSE,), (OPEN,))
_SURE = Sure(CLOSE, (OPEN,))
_AFTER_VALUE = Marks(_VALUE_END, CLOSE)


class GlmCalls:
    triggers: tuple[str, ...] = (OPEN,)
    closers: tuple[str, ...] = (CLOSE, _KEY_END, _VALUE_END)
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        blanks = yield from source.blanks()
        name, mark = yield from source.upto(_NAME_END, MAX_NAME)
        if mark in ("", OPEN) or not is_name(name.strip()):
            source.at -= len(mark)
            return give_up(source, reply, trigger + blanks + name)
        name = name.strip()
        reply.open(name)
        error, whole = yield from self._arguments(source, Fields(reply, asked.tools.get(name)), mark)
        if error and not whole:
            yield from _REST.skip(source)
        reply.close(error)

    def _arguments(self, source: Source, fields: Fields, mark: str) -> Step[tuple[str, bool]]:
        """Read the arguments up to the end of the call; what is wrong with them, and whether the end was
        reached."""
        junk: list[str] = []
        if mark == "\n":
            mark = yield from source.until(_INSIDE, junk.append)
        while mark == _KEY:
            key, mark = yield from source.upto(_AFTER_KEY, MAX_NAME)
            if mark == _KEY_END:
                yield from source.blanks()
                mark = yield from source.accept(_VALUE)
            if mark != _VALUE:
                if mark:
                    source.at -= len(mark)
                    return "malformed", False
                return "truncated" if source.stops_in(_VALUE) else "malformed", False
            mark = yield from fields.read(source, key.strip(), _AFTER_VALUE, sure=_SURE)
            if mark == _VALUE_END:
                mark = yield from source.until(_INSIDE, junk.append)
        if not mark:
            return "truncated", False
        if mark == OPEN:  # another one begins: this one may have gone on
            source.at -= len(mark)
            return "malformed", False
        fields.end()
        return "malformed" if fields.twice or "".join(junk).strip() else "", True
