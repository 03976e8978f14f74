"""Tool calls in the Hermes / Qwen form:

    text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text

- The call's JSON ends where its braces say, never at a tag inside a string.
- No arguments, `null` and a blank string all mean `{}`. Arguments given as a JSON string are
  that string's content.
"""

from __future__ import annotations

from tools_bridge.deltas import Parsed
from tools_bridge.named_object import NamedObject
from tools_bridge.parser import Asked, StepParser, tagged
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step, drop

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_JUNK = 4096  # characters between an object and its closing tag; after more than that none is awaited
_TAGS = Marks(OPEN, CLOSE)


def parse(text: str, final: bool = True) -> Parsed:
    """What `text` holds; if not `final`, without what only more text can decide."""
    parser = DeltaTracker()
    parser.feed(text)
    if final:
        parser.finish()
    return parser.parsed


class DeltaTracker(StepParser):
    """The parser of this form by itself, for any tool and without reasoning."""

    def __init__(self) -> None:
        super().__init__(tagged(HermesCalls(), None, Asked()))


class HermesCalls:
    triggers: tuple[str, ...] = (OPEN,)
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        call = NamedObject(reply)
        error = yield from call.read(source)
        if not call.opened:
            # Where it never had a name, it was text after all.
            (reply.cut if error == "truncated" else reply.say)(trigger + call.raw)
        elif error == "truncated":
            reply.close(error)
        elif error:
            yield from source.before(_TAGS, drop)
            yield from source.accept(CLOSE)
            reply.close(error)
        else:
            yield from _closing(source, reply, call)


def _closing(source: Source, reply: Reply, call: NamedObject) -> Step[None]:
    """Behind the object a tag should come, but small models forget it."""
    yield from source.blanks()
    junk, tag = yield from source.upto(_TAGS, MAX_JUNK)
    if tag == CLOSE:
        reply.close("malformed" if junk else call.verdict)
    else:  # text, another call, or nothing
        source.at -= len(tag)
        reply.close(call.verdict)
        if tag or not CLOSE.startswith(junk):  # the text may end within the tag
            reply.say(junk)
