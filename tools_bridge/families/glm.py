"""Tool calls of GLM 4.5 and later. Newlines between the parts come and go with the version:

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

A string is written as it is, all other values as JSON: they are read by the tool's schema.
"""

from __future__ import annotations

from tools_bridge.parser import MAX_NAME, Asked, give_up
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step
from tools_bridge.typed import Fields, Sure

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME_END = Marks(_KEY, CLOSE, "\n")
_INSIDE = Marks(_KEY, CLOSE)
_AFTER_KEY = Marks(_KEY_END, _VALUE, CLOSE)
_SURE = Sure(CLOSE, (OPEN,))
_AFTER_VALUE = Marks(_VALUE_END, CLOSE)


class GlmCalls:
    triggers: tuple[str, ...] = (OPEN,)
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        blanks = yield from source.blanks()
        name, mark = yield from source.upto(_NAME_END, MAX_NAME)
        if not name.strip() or not mark or "<" in name:
            source.at -= len(mark)
            return give_up(source, reply, trigger + blanks + name)
        name = name.strip()
        reply.open(name)
        reply.close((yield from self._arguments(source, Fields(reply, asked.tools.get(name)), mark)))

    def _arguments(self, source: Source, fields: Fields, mark: str) -> Step[str]:
        """Read the arguments up to the end of the call; what is wrong with them."""
        junk: list[str] = []
        if mark == "\n":
            mark = yield from source.until(_INSIDE, junk.append)
        while mark == _KEY:
            key, mark = yield from source.upto(_AFTER_KEY, MAX_NAME)
            if mark == _KEY_END:
                yield from source.blanks()
                mark = yield from source.accept(_VALUE)
            if mark != _VALUE:
                return "malformed" if mark or not source.stops_in(_VALUE) else "truncated"
            mark = yield from fields.read(source, key.strip(), _AFTER_VALUE, sure=_SURE)
            if mark == _VALUE_END:
                mark = yield from source.until(_INSIDE, junk.append)
        if not mark:
            return "truncated"
        fields.end()
        return "malformed" if fields.twice or "".join(junk).strip() else ""
