"""What is certain of a prompt as one result grows: a beginning of every prompt that may come, found with
one rendering each time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from agentserve.models.source import resolve
from agentserve.server.http.history import message_dicts, tool_dicts
from agentserve.server.http.schemas import ToolDef
from agentserve.server.http.sessions.certain import UNCERTAIN_TOKENS, Certain
from agentserve.server.limits import Limits
from agentserve.server.sessions.transcript import Held, Transcript
from agentserve.server.text_port import ChatTemplate
from agentserve.text import load
from agentserve.types import SessionId
from tests.api_rig import TOOLS
from tests.fakes import ByteTemplate

CALLS = ("a", "b")
MESSAGES = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            for call in CALLS
        ],
    },
]
KEPT = Transcript(
    SessionId("s"), msgspec.json.encode(MESSAGES), msgspec.json.encode({"tools": TOOLS}), ((1, 2),)
)


class Counting:
    """A template that counts its renderings."""

    def __init__(self, template: Any) -> None:
        self.template = template
        self.count = 0

    def render(self, *args: Any, **kwargs: Any) -> array[int]:
        self.count += 1
        made: array[int] = self.template.render(*args, **kwargs)
        return made


class LengthFirst(ByteTemplate):
    """Says how long a message is before it says it."""

    def render(self, messages: Sequence[Any], **fields: Any) -> array[int]:  # type: ignore[override]
        told = [{**m, "content": f"[{len(m['content'] or '')}] {m['content'] or ''}"} for m in messages]
        return super().render(told, **fields)


def said(certain: Certain, template: Any, text: str, kept: Transcript = KEPT) -> array[int]:
    return certain.tokens(
        template,
        kept,
        calls=CALLS,
        growing="a",
        text=text,
        cut=set(),
        spliced={},
        tails={},
        limits=Limits(),
    )


def prompt(template: ChatTemplate, text: str, after: str = "") -> array[int]:
    """What comes of it in the end."""
    results = [
        {"role": "tool", "tool_call_id": call, "content": content}
        for call, content in zip(CALLS, (text, after), strict=True)
    ]
    tools = tool_dicts(msgspec.convert(TOOLS, list[ToolDef]), Limits())
    return template.render(message_dicts([*MESSAGES, *results], Limits()), tools=tools)


def test_each_step_costs_one_rendering_but_the_first() -> None:
    certain, template = Certain(), Counting(ByteTemplate())
    whole = prompt(ByteTemplate(), "rain, and more rain" * 9)
    for step in range(1, 9):
        text = "rain, and more rain" * step
        found = said(certain, template, text)
        assert template.count == step + 1
        assert found == whole[: len(found)]
        other = prompt(ByteTemplate(), text + "#")
        end = next(i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
        assert len(found) == end - UNCERTAIN_TOKENS


def test_another_result_that_comes_meanwhile_is_not_taken_for_the_text() -> None:
    certain, template = Certain(), Counting(ByteTemplate())
    said(certain, template, "rain" * 99)
    later = msgspec.structs.replace(KEPT, held={"b": Held(b'"noon, and long"', b"", 0)})
    for step in (100, 101):
        found = said(certain, template, "rain" * step, later)
        whole = prompt(ByteTemplate(), "rain" * 200, "noon, and long")
        assert found == whole[: len(found)]
    assert template.count == 2 + 2 + 1


def test_a_template_that_says_what_comes_first_is_found_out() -> None:
    certain, template = Certain(), Counting(LengthFirst())
    whole = prompt(LengthFirst(), "rain" * 2000)
    steps = [said(certain, template, "rain" * count) for count in (10, 100, 1000, 1500, 1600)]
    right = [found == whole[: len(found)] for found in steps]
    assert right == [True, False, True, True, True], "it is wrong once, and nothing is lost by it"
    assert template.count == 2 + 1 + 2 + 2 + 2


@pytest.mark.parametrize("text", ["", " ", "\n" * 600])
def test_of_white_space_nothing_is_certain(text: str) -> None:
    assert said(Certain(), Counting(ByteTemplate()), text) == array("i")


@pytest.mark.model
def test_what_is_said_of_a_real_tokenizer_is_a_beginning_of_what_comes() -> None:
    template = load(resolve("smollm2-135m").path, None).template
    output = "".join(
        f"{n:04d}  {'=' * (n % 7)} file_{n}.py{' ' * (n % 13)}\n{chr(10) * (n % 5)}" for n in range(300)
    )
    whole, certain, told = prompt(template, output), Certain(), 0
    for size in range(512, len(output), 397):
        found = said(certain, template, output[:size])
        assert found == whole[: len(found)], size
        assert len(found) >= told
        told = len(found)
    assert told > len(whole) * 0.9
