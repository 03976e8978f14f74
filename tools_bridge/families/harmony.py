"""The replies of gpt-oss: messages on channels, the first of them already begun by the prompt.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant to=functions.f<|channel|>commentary
    <|constrain|>json<|message|>{...}

`analysis` is reasoning, `final` and what `commentary` says to no tool are content. The tokens that end
the turn (`<|call|>`, `<|return|>`) are no part of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tools_bridge.json_end import give_object
from tools_bridge.parser import Asked, Program, give_up, is_name
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step, drop

START, END, CHANNEL, MESSAGE, CONSTRAIN = (
    "<|start|>",
    "<|end|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
)
MARKERS = (START, END, CHANNEL, MESSAGE, CONSTRAIN)
ENDS = ("<|call|>", "<|return|>")
MAX_HEADER = 1024  # characters
_HEADER_END = Marks(MESSAGE, END, *ENDS)
_BODY_END = Marks(END, START)
_CALL_END = Marks(END, START, *ENDS)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def harmony(asked: Asked) -> Program:
    def program(source: Source, reply: Reply) -> Step[None]:
        while (yield from source.peek()):
            yield from _message(source, reply, asked)

    return program


def _message(source: Source, reply: Reply, asked: Asked) -> Step[None]:
    blanks = yield from source.blanks()
    begun = yield from source.accept(CHANNEL, START, MESSAGE, CONSTRAIN, "to=", END, *ENDS)
    if begun in (END, *ENDS):
        return
    if not begun:  # not in the form at all
        reply.say(blanks)
        yield from source.before(_BODY_END, reply.say)
        return
    header, mark = begun, begun
    if begun != MESSAGE:
        rest, mark = yield from source.upto(_HEADER_END, MAX_HEADER)
        header += rest
    if mark != MESSAGE:
        return give_up(source, reply, header + mark)
    channels, recipients = _CHANNEL.findall(header), _RECIPIENT.findall(header)
    recipient = recipients[-1] if recipients else ""
    if recipient.startswith("functions.") or recipient in asked.tools:
        yield from _call(source, reply, recipient.removeprefix("functions."), asked)
    elif channels and channels[-1] == "analysis":
        reply.think()
        yield from _body(source, reply.say)
        reply.end_thinking()
    elif recipient in ("", "assistant", "user") and (not channels or channels[-1] in ("final", "commentary")):
        yield from _body(source, reply.say)
    else:
        yield from _body(source, drop)


def _body(source: Source, sink: Callable[[str], None], ends: Marks = _BODY_END) -> Step[None]:
    mark = yield from source.until(ends, sink)
    if mark == START:
        source.at -= len(mark)


def _call(source: Source, reply: Reply, name: str, asked: Asked) -> Step[None]:
    if not asked.calls or not is_name(name):
        return (yield from _body(source, drop))
    reply.open(name)
    error = yield from give_object(source, reply)
    junk: list[str] = []
    if error != "truncated":
        yield from _body(source, junk.append, _CALL_END)
    reply.close(error or ("malformed" if "".join(junk).strip() else ""))
