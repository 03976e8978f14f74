"""Takes replies apart while they are written: one interface, whatever form a model's family uses.

What a text means is a pure function of it; a parser computes that function piece by piece, in time
linear in the text, whatever the pieces. The rules all families share:

- A call counts as opened once its name is known. What only looks like the beginning of a call is plain
  text, and nothing of it is lost: marks and all, as it was written.
- From then on all of its text is the call's, and none of it is content or reasoning. It ends with what
  ends it in its form; where something is wrong with it, with its closing mark, before the next call's
  opening mark, or with the text.
- A call the text ends within is "truncated", one whose arguments are no JSON object by `json_value` is
  "malformed". Neither is ever repaired, and neither may be run. Clients have its name and what there was
  of its arguments, streamed or not, and a finish reason that is not "tool_calls".
- A whole call whose closing mark is missing is a call; what comes behind it is text. A closing mark that
  closes nothing is text before the first call of a reply, and dropped behind it.
- A call is written out as its arguments become certain, in order, one call at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tools_bridge.deltas import Delta, Parsed
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step, drop
from tools_bridge.types import ToolSpec

MAX_NAME = 256  # characters of a tool's name; what is longer is no name
_NAME = re.compile(r"""[^\s<>{}()\[\]|｜"'`\\]+""")  # where it has no quotes of its own


class ReplyParser(Protocol):
    """Finds content, reasoning and calls in growing text; joined, the deltas are `parsed`."""

    def feed(self, text: str) -> list[Delta]:
        """Take in more text; what it decided."""
        ...

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """The text has ended, or was `cut` off: what that decided."""
        ...

    @property
    def parsed(self) -> Parsed:
        """Everything found so far."""
        ...

    @property
    def thinking(self) -> bool:
        """The text so far ends within reasoning."""
        ...


@dataclass(frozen=True, slots=True)
class Think:
    """How reasoning is set apart. `tokens`: the control tokens in it, where the marks are not these."""

    open: str
    close: str
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a parser must know of the request. Calls are looked for only if `calls`."""

    calls: bool = True
    tools: Mapping[str, ToolSpec] = field(default_factory=dict)
    inside: bool = False  # the prompt ends where reasoning has begun already

    @classmethod
    def of(cls, tools: Sequence[ToolSpec], *, inside: bool = False) -> Asked:
        return cls(True, {tool.name: tool for tool in tools}, inside)


class Calls(Protocol):
    """Reads calls of one form."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """Each may begin one."""
        ...

    @property
    def closers(self) -> tuple[str, ...]:
        """Marks that end a call or a part of one, and mean nothing elsewhere."""
        ...

    @property
    def ends_thinking(self) -> bool:
        """A call that comes while the model reasons is meant: it forgot to say that it had ended."""
        ...

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        """Read on behind `trigger`, up to where content may go on."""
        ...


Program = Callable[[Source, Reply], Step[None]]


class StepParser:
    """Runs a reader over text that comes in pieces."""

    def __init__(self, program: Program) -> None:
        self._source, self._reply = Source(), Reply()
        self._steps = program(self._source, self._reply)
        self._running = True

    @property
    def parsed(self) -> Parsed:
        return self._reply.parsed

    @property
    def thinking(self) -> bool:
        return self._reply.thinking

    def feed(self, text: str) -> list[Delta]:
        if self._source.ended:
            raise RuntimeError("text after the end")
        self._source.push(text)
        self._advance()
        return self._reply.take()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        self._source.ended = True
        self._advance()
        self._reply.finish(cut=cut)
        return self._reply.take()

    def _advance(self) -> None:
        if self._running:
            self._running = next(self._steps, self) is None


def tagged(calls: Calls, think: Think | None, asked: Asked, hidden: Sequence[str] = ()) -> Program:
    """The reader of replies that are text in which reasoning and calls have marks of their own.

    `hidden` marks are dropped wherever they are no part of a call or of reasoning.
    """
    triggers = calls.triggers if asked.calls else ()
    closers = calls.closers if asked.calls else ()
    hidden = [mark for mark in hidden if mark not in triggers]
    marks = Marks(*((think.open, think.close) if think else ()), *triggers, *hidden, *closers)

    def program(source: Source, reply: Reply) -> Step[None]:
        reply.verbatim = not triggers
        if think and asked.inside:
            yield from source.blanks()
            yield from source.accept(think.open)  # some write it again
            reply.think()
        while mark := (yield from source.until(marks, reply.say)):
            if mark in triggers and (calls.ends_thinking or not reply.thinking):
                yield from calls.read(source, reply, mark, asked)
            elif think and mark == think.close and (reply.thinking or reply.blank):
                reply.think()  # where it has ended already, it is said once more
                reply.end_thinking()
            elif think and mark == think.open and reply.blank and not reply.thinking:
                reply.think()
            elif reply.thinking or not (mark in hidden or (mark in closers and reply.called)):
                reply.say(mark)

    return program


def give_up(source: Source, reply: Reply, text: str, *awaited: str) -> None:
    """What was read, `text`, is no call, but only text after all. Where the text ends at once, or in the
    beginning of what was `awaited`, it is a call cut off."""
    if source.stops_in(*awaited):
        reply.cut(text)
    else:
        reply.say(text)


def is_name(text: str) -> bool:
    """Whether this can be a tool's name: without blanks, and without what marks are made of."""
    return bool(_NAME.fullmatch(text))


class Rest:
    """What remains of a call that something is wrong with: up to its end, or the beginning of another."""

    def __init__(self, closing: Sequence[str], opening: Sequence[str]) -> None:
        self._opening = opening
        self._marks = Marks(*closing, *opening)

    def skip(self, source: Source) -> Step[None]:
        """Read on to behind the next closing mark or before the next opening one."""
        mark = yield from source.until(self._marks, drop)
        if mark in self._opening:
            source.at -= len(mark)
