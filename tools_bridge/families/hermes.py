"""Tool calls in the Hermes / Qwen form:

    text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text

- The call's JSON ends where its braces say, never at a tag inside a string.
- No arguments, `null` and a blank string all mean `{}`. Arguments given as a JSON string are
  that string's content.
"""

from __future__ import annotations

from tools_bridge.json_end import Closing
from tools_bridge.named_object import NamedObject
from tools_bridge.parser import Asked
from tools_bridge.reply import Reply
from tools_bridge.source import Source, Step

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CLOSING = Closing(CLOSE, (OPEN,))


class HermesCalls:
    triggers: tuple[str, ...] = (OPEN,)
    closers: tuple[str, ...] = (CLOSE,)
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        call = NamedObject(reply)
        error = yield from call.read(source)
        if not call.opened:
            # Where it never had a name, it was text after all.
            (reply.cut if error == "truncated" else reply.say)(trigger + call.raw)
        else:
            yield from _CLOSING.read(source, reply, error, call.verdict if not error else "")
