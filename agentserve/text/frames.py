"""What a template writes around an assistant's turn, learned by rendering small conversations.

A turn that was generated goes back into the prompt as the very ids, so what the template would
write in its place has to be found: from where generation began to where it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentserve.text.conversation import Call, Message
from agentserve.text.errors import TextError
from tools_bridge.json_value import Json

_USER = Message("user", ("u",))
_REPLY = Message("assistant", ("r",))
_ID = "a1b2c3d4e"  # what Mistral's templates take for an id
_RESULT = Message("tool", ("t",), call_id=_ID, name="f")

TOOL: dict[str, Json] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"k": {"type": "string", "description": "d"}},
            "required": ["k"],
        },
    },
}


class Render(Protocol):
    """A conversation as the template writes it; TextError where it refuses."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """An assistant's turn behind messages of one kind.

    `tail` is what the generation prompt has behind that message. Past turns begin with `shared` of its
    characters; then `heads` may stand before the turn's text, `call_heads` before the name of its first
    call, the longest first.
    """

    tail: str
    shared: int
    heads: tuple[str, ...]
    call_heads: tuple[str, ...]

    @property
    def opening(self) -> str:
        """What ends the generation prompt and is missing in past turns (say, an opened `<think>`)."""
        return self.tail[self.shared :]

    def begun(self, tail: str) -> TurnFrame:
        """The frame of a turn whose prompt had another tail (it was asked to think, and this request is
        not): it stands behind that one. "": it is not known."""
        if not tail or tail == self.tail:
            return self
        both = _beginning(self.tail[: self.shared], tail)
        between = self.tail[len(both) : self.shared]
        heads, call_heads = (tuple(between + head for head in all_) for all_ in (self.heads, self.call_heads))
        return TurnFrame(tail, len(both), heads, call_heads)


NO_FRAME = TurnFrame("", 0, (), ())


@dataclass(frozen=True, slots=True)
class Frames:
    """Turns behind a user's message, and behind results of tools. `after` stands behind a turn's text,
    `after_call` behind the name of its call, where that is all there is."""

    after_user: TurnFrame
    after_result: TurnFrame
    after: str
    after_call: str

    def behind(self, role: str | None) -> TurnFrame:
        return self.after_result if role == "tool" else self.after_user


def learn(render: Render, mark: str) -> Frames:
    """`mark`: a character that the template does not contain."""
    asked = [replace(_USER, parts=(mark,))]
    resulted = [_USER, _call("f"), replace(_RESULT, parts=(mark,))]
    answered = _shown(render, [_USER, Message("assistant", (mark,)), _USER])
    return Frames(
        after_user=_frame(render, asked, mark),
        after_result=_frame(render, resulted, mark),
        after=answered.partition(mark)[2] if answered.count(mark) == 1 else "",
        after_call=_shown(render, [_USER, _call(mark)]).partition(mark)[2],
    )


def within_a_turn(render: Render, marks: tuple[str, str], control: str) -> bool:
    """Whether the template writes `control` between the parts of one turn: then it ends none."""
    text, name = marks
    shown = _shown(render, [_USER, Message("assistant", (text,), (Call(_ID, name, {}),)), _RESULT])
    _, found, rest = shown.partition(text)
    between, called, _ = rest.partition(name)
    return bool(found and called) and control in between


def _frame(render: Render, history: Sequence[Message], mark: str) -> TurnFrame:
    """`history` ends with the mark. What stands before that is not compared: turns may look otherwise once
    another user's message follows. Nor is what stands at the end where nothing does: Phi's writes another."""
    _, found, prompt = _shown(render, history, generation=True).partition(mark)
    if not found:
        return NO_FRAME

    def befores(turn: Message, *futures: Sequence[Message]) -> list[str]:
        """What stands before the mark in `turn`, whatever follows it."""
        shown = (_shown(render, [*history, turn, *future]).split(mark) for future in futures)
        return [between for _, between, *rest in (text for text in shown if len(text) > 1) if rest]

    texts = befores(Message("assistant", (mark,)), [], [_USER])
    calls = befores(_call(mark), [_RESULT], [_RESULT, _REPLY, _USER])
    shared = min((_beginning(prompt, before) for before in texts + calls), key=len, default="")
    return TurnFrame(prompt, len(shared), _heads(texts, shared), _heads(calls, shared))


def _beginning(one: str, other: str) -> str:
    """What both begin with."""
    length = min(len(one), len(other))
    return one[: next((at for at in range(length) if one[at] != other[at]), length)]


def _heads(befores: Iterable[str], shared: str) -> tuple[str, ...]:
    return tuple(sorted({before[len(shared) :] for before in befores}, key=len, reverse=True))


def _call(name: str) -> Message:
    return Message("assistant", calls=(Call(_ID, name, {"k": "v"}),))


def _shown(render: Render, messages: Sequence[Message], *, generation: bool = False) -> str:
    """Empty where the template refuses."""
    try:
        return render(messages, add_generation_prompt=generation)
    except TextError:
        return ""
