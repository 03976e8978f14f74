"""Prompts that only grow, from templates that move what stands first.

Mistral's templates v3 to v11 write tools (and v3 the system message) in front of the last user's message:
with each new one everything behind the one before has to be computed again. Here both stay in front of
the first, as Mistral's own later templates (v13) have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentserve.text.errors import TextError
from agentserve.text.facts import TemplateMessage


class Render(Protocol):
    """A template; TextError where it refuses."""

    def __call__(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = False,
    ) -> str: ...


_SYSTEM: TemplateMessage = {"role": "system", "content": "s"}
_USER: TemplateMessage = {"role": "user", "content": "u"}
_ANSWER: TemplateMessage = {"role": "assistant", "content": "a"}
_NEXT: TemplateMessage = {"role": "user", "content": "n"}  # equal ones may each be taken for the last
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def moves(render: Render) -> bool:
    """Whether the template moves tools or the system message with the last user's message, and writes a
    conversation without them so that they can be put in front of it."""
    asked: list[TemplateMessage] = [_SYSTEM, _USER]
    longer = [*asked, _ANSWER, _NEXT]
    try:
        before = render(asked, [_TOOL])
        if render(longer, [_TOOL]).startswith(before):
            return False
        return steady(render, longer, [_TOOL]).startswith(before)
    except TextError:
        return False


def steady(
    render: Render,
    messages: Sequence[TemplateMessage],
    tools: Sequence[object] | None,
    add_generation_prompt: bool = False,
) -> str:
    """What the template writes up to the first user's message, and what it writes behind it in the same
    conversation without tools and system message. TextError where the one does not continue the other."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return render(messages, tools, add_generation_prompt)
    head = messages[: first + 1]
    plain = [message for message in head if message["role"] != "system"]
    begun = render(plain)
    whole = render([*plain, *messages[first + 1 :]], None, add_generation_prompt)
    if not whole.startswith(begun):
        raise TextError("chat template: a longer conversation does not begin as a shorter one")
    return render(head, tools) + whole[len(begun) :]
