"""Tool calls of DeepSeek V3, R1 and V3.1:

V3   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name
     ```json
     {...}
     ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1 <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...
"""

from __future__ import annotations

from tools_bridge.json_end import Closing, give_object
from tools_bridge.parser import MAX_NAME, Asked, give_up, is_name
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (BEGIN, END, CALL, SEPARATOR, CALL_END)
_KIND_END = Marks(SEPARATOR, CALL_END, END, BEGIN, CALL)
_NAME_END = Marks("\n", "{", CALL_END, END, BEGIN, CALL)
_CLOSING = Closing(CALL_END, (END, BEGIN, CALL))
_FENCE = "```"


class DeepSeekCalls:
    triggers: tuple[str, ...] = (BEGIN, CALL)
    closers: tuple[str, ...] = ()
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        if trigger == BEGIN:
            blanks = yield from source.blanks()
            if not (yield from source.accept(CALL)):
                return give_up(source, reply, trigger + blanks, CALL)
            trigger += blanks + CALL
        mark = CALL
        while mark == CALL:
            opened = yield from self._call(source, reply, trigger)
            if not opened:
                return
            yield from source.blanks()
            mark = yield from source.accept(CALL, END)
            trigger = CALL

    def _call(self, source: Source, reply: Reply, before: str) -> Step[bool]:
        name, mark = yield from source.upto(_KIND_END, MAX_NAME)
        before += name
        if mark == SEPARATOR:
            before += mark + (yield from source.blanks())
            if (yield from source.peek()) not in ("{", "`"):  # what came is "function"
                name, mark = yield from source.upto(_NAME_END, MAX_NAME)
                before += name
        if mark not in (SEPARATOR, "\n", "{") or not is_name(name.strip()):
            source.at -= len(mark) if mark != SEPARATOR else 0
            give_up(source, reply, before)
            return False
        if mark == "{":
            source.at -= 1
        reply.open(name.strip())
        yield from source.blanks()
        if (yield from source.accept(_FENCE)):
            yield from source.accept("json")
        error = yield from give_object(source, reply, _FENCE, "json")
        if not error:
            yield from source.blanks()
            yield from source.accept(_FENCE)
        yield from _CLOSING.read(source, reply, error)
        return True
