"""Tool calls of Kimi K2. The name is part of the call's id:

<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>

What a section holds beside calls is dropped, once a call is in it or it has ended.
"""

from __future__ import annotations

from tools_bridge.json_end import Closing, give_object
from tools_bridge.parser import MAX_NAME, Asked, give_up, is_name
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = (BEGIN, END, CALL, ARGUMENTS, CALL_END)
_NAME_END = Marks(ARGUMENTS, CALL_END, END, BEGIN, CALL)
_SECTION = Marks(CALL, END)
_CLOSING = Closing(CALL_END, (END, BEGIN, CALL))


class KimiCalls:
    triggers: tuple[str, ...] = (BEGIN, CALL)
    closers: tuple[str, ...] = ()
    ends_thinking = True

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        before: list[str] = []
        if trigger == BEGIN:
            before = [BEGIN]
            trigger = yield from source.until(_SECTION, before.append)
            if not trigger:
                return reply.cut("".join(before))
        while trigger == CALL:
            opened = yield from self._call(source, reply, "".join(before))
            if not opened:
                return
            before = []
            yield from source.blanks()
            trigger = yield from source.accept(CALL, END)

    def _call(self, source: Source, reply: Reply, before: str) -> Step[bool]:
        raw, mark = yield from source.upto(_NAME_END, MAX_NAME)
        name = _name(raw)
        if mark != ARGUMENTS or not is_name(name):
            source.at -= len(mark)
            give_up(source, reply, before + CALL + raw)
            return False
        reply.open(name)
        error = yield from give_object(source, reply)
        yield from _CLOSING.read(source, reply, error)
        return True


def _name(call_id: str) -> str:
    """The tool of an id: `functions.name:0`."""
    name, _, number = call_id.strip().rpartition(":")
    if not name or not number.isdigit():
        name = call_id.strip()
    return name.removeprefix("functions.")
