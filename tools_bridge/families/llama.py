"""Tool calls of Llama 3 as JSON: a reply that is nothing but calls,

    <|python_tag|>{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}

with or without the tag. No mark sets such a call apart from JSON that was asked for: without the tag, a
name that no offered tool has makes it text.
"""

from __future__ import annotations

from tools_bridge.named_object import NamedObject
from tools_bridge.parser import Asked, Rest, give_up
from tools_bridge.reply import Reply
from tools_bridge.source import Source, Step

TAG = "<|python_tag|>"
MARKERS = (TAG,)
_REST = Rest((), (TAG,))


class LlamaCalls:
    triggers: tuple[str, ...] = (TAG, "{")
    closers: tuple[str, ...] = ()
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        if trigger == "{":
            if not reply.blank:
                return reply.say(trigger)
            source.at -= 1
            trigger = ""
        else:
            trigger += yield from source.blanks()
        more, before = ";", trigger
        while more:
            known = None if trigger or not asked.tools else asked.tools
            call = NamedObject(reply, keys=("parameters", "arguments"), known=known)
            error = yield from call.read(source)
            if not call.opened:
                if trigger or (error == "truncated" and reply.called):
                    return give_up(source, reply, before + call.raw)
                return reply.say(before + call.raw)  # JSON, whole or not
            if error == "malformed":
                yield from _REST.skip(source)
            reply.close(error or call.verdict)
            if error:
                return
            yield from source.blanks()
            before = more = yield from source.accept(";", ",")
            if more:
                before += yield from source.blanks()
                more = yield from source.peek()
            trigger = ""
