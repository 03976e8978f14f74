"""Tool calls of Llama 4 (and Llama 3.2) as a Python list: a reply that is nothing but

    [f(a=1, b="x"), g()]

perhaps between `<|python_start|>` and `<|python_end|>`. A list that does not begin with the name of an
offered tool is text. An argument is given once it is whole: its literals are no JSON.
"""

from __future__ import annotations

from tools_bridge.families.llama import LlamaCalls
from tools_bridge.parser import MAX_NAME, Asked, Calls, Rest, give_up
from tools_bridge.python_call import CallEnd, arguments
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step

START, END = "<|python_start|>", "<|python_end|>"
MARKERS = (START, END)
_NAME_END = Marks("(", "\n", "]", ",")
_REST = Rest((END,), (START,))


class LlamaPythonicCalls:
    """Lists, and the JSON form of Llama 3, which these models fall back to."""

    closers: tuple[str, ...] = ()
    ends_thinking = False

    def __init__(self) -> None:
        self._json, self._lists = LlamaCalls(), PythonicCalls()
        self.triggers = (*self._json.triggers, *self._lists.triggers)

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        form: Calls = self._json if trigger in self._json.triggers else self._lists
        yield from form.read(source, reply, trigger, asked)


class PythonicCalls:
    triggers: tuple[str, ...] = (START, "[")
    closers: tuple[str, ...] = ()
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        before = trigger
        if trigger == START:
            before += yield from source.blanks()
            if not (yield from source.accept("[")):
                return give_up(source, reply, before, "[")
            before += "["
        elif not reply.blank:
            return reply.say(trigger)
        more = ","
        while more:
            before += yield from source.blanks()
            name, mark = yield from source.upto(_NAME_END, MAX_NAME)
            if mark != "(" or (asked.tools and name not in asked.tools) or not _is_name(name):
                source.at -= len(mark)
                if reply.called and source.stops_in():
                    return reply.cut(before + name)
                return reply.say(before + name)
            error = yield from _call(source, reply, name)
            if error:
                return
            yield from source.blanks()
            before = more = yield from source.accept(",")
        yield from source.accept("]")
        yield from source.blanks()
        yield from source.accept(END)


def _call(source: Source, reply: Reply, name: str) -> Step[str]:
    """Read from behind the parenthesis on; what is wrong with it."""
    reply.open(name)
    end = CallEnd()
    end.feed("(", 0)
    raw: list[str] = []  # of the argument that is being read
    before, error = "{", ""
    while not end.done:
        raw.append(source.take(end.feed(source.text, source.at)))
        if end.between or end.done:
            given, raw = arguments(f"{name}({''.join(raw)[:-1]})"), []
            if given is None or (given == "{}" and end.between):
                error = "malformed"
                break
            if given != "{}":
                reply.arguments(before + given[1:-1])
                before = ", "
        elif end.failed or source.ended:
            error = "malformed" if end.failed else "truncated"
            break
        else:
            yield
    if error == "malformed":
        yield from _REST.skip(source)
    elif not error:
        reply.arguments("{}" if before == "{" else "}")
    reply.close(error)
    return error


def _is_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.replace("-", "_").split("."))
