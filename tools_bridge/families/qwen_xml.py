"""Tool calls as Qwen3-Coder and later Qwen models write them:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Values have no types and no escapes: they are read by the tool's schema. Models forget the outer opening
tag, and closing tags of parameters.
"""

from __future__ import annotations

from tools_bridge.parser import MAX_NAME, Asked, Rest, give_up, is_name
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step
from tools_bridge.typed import Fields, Sure

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_END = Marks(">", "<")
_INSIDE = Marks(_PARAMETER, _END, CLOSE, OPEN, _FUNCTION)
_REST = Rest((_END, CLOSE), (OPEN, _FUNCTION))
_SURE = Sure(_PARAMETER_END, (_PARAMETER, _END, CLOSE))
_VALUE_END = Marks(_PARAMETER_END, f"\n{_PARAMETER}", f"\n{_END}")


class QwenXmlCalls:
    triggers: tuple[str, ...] = (OPEN, _FUNCTION)
    closers: tuple[str, ...] = (CLOSE, _END, _PARAMETER_END)
    ends_thinking = True

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        before = trigger
        if trigger == OPEN:
            before += yield from source.blanks()
            if not (yield from source.accept(_FUNCTION)):
                return give_up(source, reply, before, _FUNCTION)
            before += _FUNCTION
        name, mark = yield from source.upto(_NAME_END, MAX_NAME)
        if mark != ">" or not is_name(name.strip()):
            source.at -= len(mark)
            return give_up(source, reply, before + name)
        name = name.strip()
        reply.open(name)
        error, mark = yield from self._arguments(source, Fields(reply, asked.tools.get(name)))
        if error and not mark:
            yield from _REST.skip(source)
        reply.close(error)
        if error != "truncated" and mark != CLOSE:
            yield from source.blanks()
            yield from source.accept(CLOSE)

    def _arguments(self, source: Source, fields: Fields) -> Step[tuple[str, str]]:
        """Read the parameters up to the end of the function; what is wrong with them, and the mark that
        ended it (in vain: "")."""
        junk: list[str] = []
        mark = yield from source.until(_INSIDE, junk.append)
        while mark.strip() == _PARAMETER:
            key, mark = yield from source.upto(_NAME_END, MAX_NAME)
            if mark != ">":
                source.at -= len(mark)
                return "truncated" if source.stops_in() else "malformed", ""
            mark = yield from fields.read(source, key.strip(), _VALUE_END, lines=True, sure=_SURE)
            if mark == _PARAMETER_END:
                mark = yield from source.until(_INSIDE, junk.append)
        if not mark:
            return "truncated", ""
        if mark in (OPEN, _FUNCTION):  # another one begins: this one may have gone on
            source.at -= len(mark)
            return "malformed", ""
        fields.end()
        return "malformed" if fields.twice or "".join(junk).strip() else "", mark
