"""Tool calls of Kimi K2. The name is part of the call's id:

<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from tools_bridge.json_end import give_object
from tools_bridge.parser import MAX_NAME, Asked, give_up
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step, drop

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = (BEGIN, END, CALL, ARGUMENTS, CALL_END)
_NAME_END = Marks(ARGUMENTS, CALL_END, END)
_SECTION = Marks(CALL, END)
_REST = Marks(CALL_END, END)


class KimiCalls:
    triggers: tuple[str, ...] = (BEGIN, CALL)
    ends_thinking = True

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        mark = trigger
        if trigger == BEGIN:
            noise: list[str] = []
            mark = yield from source.until(_SECTION, noise.append)
            if not mark:
                reply.cut(trigger + "".join(noise))
        while mark == CALL:
            opened = yield from self._call(source, reply)
            if not opened:
                return
            yield from source.blanks()
            mark = yield from source.accept(CALL, END)

    def _call(self, source: Source, reply: Reply) -> Step[bool]:
        raw, mark = yield from source.upto(_NAME_END, MAX_NAME)
        name = _name(raw)
        if mark != ARGUMENTS or not name:
            give_up(source, reply, CALL + raw + mark)
            return False
        reply.open(name)
        error = yield from give_object(source, reply)
        if error == "malformed":
            yield from source.until(_REST, drop)
        elif not error:
            yield from source.blanks()
            yield from source.accept(CALL_END)
        reply.close(error)
        return True


def _name(call_id: str) -> str:
    """The tool of an id: `functions.name:0`."""
    name, _, number = call_id.strip().rpartition(":")
    if not name or not number.isdigit():
        name = call_id.strip()
    return name.removeprefix("functions.")
