"""Tool calls of DeepSeek V3, R1 and V3.1:

V3   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name
     ```json
     {...}
     ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1 <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...
"""

from __future__ import annotations

from tools_bridge.json_end import give_object
from tools_bridge.parser import MAX_NAME, Asked, give_up
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step, drop

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (BEGIN, END, CALL, SEPARATOR, CALL_END)
_KIND_END = Marks(SEPARATOR, CALL_END, END)
_NAME_END = Marks("\n", "{", CALL_END, END)
_REST = Marks(CALL, CALL_END, END)


class DeepSeekCalls:
    triggers: tuple[str, ...] = (BEGIN, CALL)
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
        before += name + mark
        if mark == SEPARATOR and (yield from source.peek()) != "{":  # what came is "function"
            name, mark = yield from source.upto(_NAME_END, MAX_NAME)
            before += name + mark
            if mark == "{":
                source.at -= 1
        if not mark or mark in (CALL_END, END) or not name.strip():
            give_up(source, reply, before)
            return False
        reply.open(name.strip())
        yield from source.blanks()
        if (yield from source.accept("```")):
            yield from source.accept("json")
        error = yield from give_object(source, reply, "```", "json")
        if error == "malformed":
            yield from source.until(_REST, drop)
        elif not error:
            yield from source.blanks()
            if (yield from source.accept("```")):
                yield from source.blanks()
            yield from source.accept(CALL_END)
        reply.close(error)
        return True
