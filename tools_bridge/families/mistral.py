"""Tool calls of Mistral models, in both forms. Tokenizers up to v7 and from v11 on:

[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
[TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{...}
"""

from __future__ import annotations

from tools_bridge.json_end import give_object
from tools_bridge.named_object import NamedObject
from tools_bridge.parser import MAX_NAME, Asked, Rest, give_up, is_name
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (OPEN, CALL_ID, ARGUMENTS)
_NAME_END = Marks(CALL_ID, ARGUMENTS, "{", OPEN)
_ID_END = Marks(ARGUMENTS, OPEN)
_REST = Rest((), (OPEN,))


class MistralCalls:
    triggers: tuple[str, ...] = (OPEN,)
    closers: tuple[str, ...] = ()
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        blanks = yield from source.blanks()
        if (yield from source.accept("[{", "[ {", "[\n{")):
            source.at -= 1
            yield from _array(source, reply, f"{trigger}{blanks}[")
        else:
            yield from _named(source, reply, trigger + blanks)


def _array(source: Source, reply: Reply, before: str) -> Step[None]:
    more = ","
    while more:
        call = NamedObject(reply)
        error = yield from call.read(source)
        if not call.opened:
            if error == "truncated":
                return reply.cut(before + call.raw)
            return reply.say(before + call.raw)
        if error == "malformed":
            yield from _REST.skip(source)
        reply.close(error or call.verdict)
        if error:
            return
        yield from source.blanks()
        if not (more := (yield from source.accept(","))):
            yield from source.accept("]")
        before = more + (yield from source.blanks())


def _named(source: Source, reply: Reply, before: str) -> Step[None]:
    name, mark = yield from source.upto(_NAME_END, MAX_NAME)
    before += name
    if mark == CALL_ID:
        call_id, mark = yield from source.upto(_ID_END, MAX_NAME)
        before += CALL_ID + call_id
    if mark == "{":
        source.at -= 1
    if mark not in (ARGUMENTS, "{") or not is_name(name.strip()):
        source.at -= len(mark) if mark == OPEN else 0
        return give_up(source, reply, before + (mark if mark not in (OPEN, "{") else ""))
    reply.open(name.strip())
    error = yield from give_object(source, reply)
    if error == "malformed":
        yield from _REST.skip(source)
    reply.close(error)
