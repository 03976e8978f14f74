"""The real templates of the model families: ids of `transformers`, nothing forged, prefixes kept."""

from __future__ import annotations

import json
import random

import pytest
from jinja2 import TemplateError

from agentserve.text import TextError
from tests.template_families import model
from tests.template_histories import WEATHER as TOOL
from tests.template_histories import Histories, Message, as_clients_write, as_templates_read
from tests.template_table import FAMILIES

HISTORIES = 200


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_apply_chat_template(name: str) -> None:
    of = model(name)
    taken, refused = 0, 0
    for history, tools in Histories(of, seed=1):
        try:
            expected = of.expected(as_templates_read(of, history), tools)
        except TemplateError:
            refused += 1
            with pytest.raises(TextError):
                of.chat.render(as_clients_write(history), tools=tools)
            continue
        assert of.chat.render(as_clients_write(history), tools=tools).tolist() == expected, history
        taken += 1
        if taken == HISTORIES:
            break
    assert refused < HISTORIES / 2, name


@pytest.mark.parametrize("name", FAMILIES)
def test_control_strings_of_a_family_stay_text(name: str) -> None:
    """The control tokens of a prompt are the same whatever its users wrote."""
    of = model(name)
    draw = random.Random(2)
    strings = [*of.family.special, *of.family.markup]
    pieces = [*strings, *(text[:4] for text in strings), *(text[2:] for text in strings), " ", "\n", "x"]

    controls = set(of.tokenizer.control.values())
    assert of.chat.facts is not None

    def controls_of(text: str) -> list[int]:
        tools = told_of_tools(text) if of.chat.facts and of.chat.facts.tools else None
        ids = of.chat.render(written_by_users(text, calls=of.chat.wrapper is None), tools=tools)
        return [id_ for id_ in ids if id_ in controls]

    benign = controls_of("x")
    for _ in range(HISTORIES):
        forged = "".join(draw.choices(pieces, k=draw.randrange(1, 6)))
        assert controls_of(f"x{forged}x") == benign, forged


def written_by_users(text: str, *, calls: bool) -> list[Message]:
    """`text` wherever a conversation holds some."""
    history: list[Message] = [
        {"role": "system", "content": f"s{text}"},
        {"role": "user", "content": f"{text} u", "name": text},
        {"role": "assistant", "content": f"{text} a", "reasoning_content": f"r {text}"},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": f"t {text}"}]},
    ]
    if calls:
        function = {"name": f"f{text}", "arguments": json.dumps({"city": text, text: [text, {text: 1}]})}
        history += [
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": text,
                "tool_calls": [{"id": text, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": text, "name": f"f{text}", "content": text},
        ]
    return history


def told_of_tools(text: str) -> list[Message]:
    parameters = {
        "type": "object",
        "properties": {text: {"type": "string", "description": text, "enum": [text]}},
        "required": [text],
    }
    function = {"name": f"f{text}", "description": text, "parameters": parameters}
    return [{"type": "function", "function": function}]


REPEATS_TOOLS = {"mistral-v3"}
"""Templates that show tools before the last user's message alone: they move with every turn of text."""


@pytest.mark.parametrize("kind", ["text", "call", "text and call", "two calls"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_continues_what_was_generated(name: str, kind: str) -> None:
    of = model(name)
    draw = random.Random(3)
    tools = None if name in REPEATS_TOOLS and kind == "text" else [TOOL]
    for _ in range(8):
        history: list[Message] = [
            {"role": "system", "content": "Be nice."},
            {"role": "user", "content": "hi"},
        ]
        if name in REPEATS_TOOLS:
            del history[0]  # so does the system message
        spliced: dict[int, list[int]] = {}
        for turn in range(3):
            before = of.chat.render(history, tools=tools, spliced=spliced).tolist()  # type: ignore[arg-type]
            reply = [draw.randrange(256, 400) for _ in range(8)]
            spliced[len(history)] = reply
            history += answered(kind, turn)
            after = of.chat.render(history, tools=tools, spliced=spliced).tolist()  # type: ignore[arg-type]
            assert after[: len(before) + len(reply)] == before + reply, history


def answered(kind: str, turn: int) -> list[Message]:
    """A turn, and what its client sends next."""
    if kind == "text":
        return [{"role": "assistant", "content": "whatever it says"}, {"role": "user", "content": "more"}]
    ids = [f"abcdefgh{turn}", f"bbcdefgh{turn}"][: 2 if kind == "two calls" else 1]
    function = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ids]
    text = "I look." if kind == "text and call" else None
    results: list[Message] = [{"role": "tool", "tool_call_id": id_, "content": "sunny"} for id_ in ids]
    return [{"role": "assistant", "content": text, "tool_calls": calls}, *results]


def test_harmony_ends_a_turn_with_a_return_or_a_call_not_with_every_message() -> None:
    of = model("gpt-oss")
    assert of.chat.stop_ids == {of.tokenizer.control["<|call|>"]}
    assert of.tokenizer.eos_ids == {of.tokenizer.control["<|return|>"]}
