"""The real templates of the model families: ids of `transformers`, nothing forged, prefixes kept."""

from __future__ import annotations

import json
import random

import pytest

from tests.template_families import FAMILIES, Model, model

Message = dict[str, object]

HISTORIES = 200
WORDS = ("Hello", " world", "\n", "  ", "12", "é", "👍", "{", '"', "\\", "'", "a|b", "You", ":", "nice.")
TOOL: Message = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of 'now' in Zürich",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


class Histories:
    """Random conversations that a family's template takes."""

    def __init__(self, of: Model, seed: int) -> None:
        self._model = of
        self._draw = random.Random(seed)
        facts = of.chat.facts
        assert facts is not None
        self._calls = of.chat.wrapper is None
        self._nothing = None if facts.null_content else ""

    def text(self) -> str:
        return "".join(self._draw.choices(WORDS, k=self._draw.randrange(1, 9)))

    def one(self) -> list[Message]:
        draw, history = self._draw, list[Message]()
        if draw.random() < 0.5:
            history.append({"role": "system", "content": self.text()})
        for _ in range(draw.randrange(1, 4)):
            history.append({"role": "user", "content": self.text()})
            for _ in range(draw.randrange(3) if self._calls else 0):
                history += self._called()
            history.append({"role": "assistant", "content": self.text()})
        if draw.random() < 0.8:
            history.append({"role": "user", "content": self.text()})
        else:
            history.pop()  # the last answer is still to come
        return history

    def _called(self) -> list[Message]:
        draw = self._draw
        count = draw.randrange(1, 3) if self._model.family.parallel else 1
        ids = ["".join(draw.choices("abcdefgh123", k=9)) for _ in range(count)]
        calls = [
            {
                "id": id_,
                "type": "function",
                "function": {"name": "get_weather", "arguments": self._arguments()},
            }
            for id_ in ids
        ]
        results = [
            {"role": "tool", "tool_call_id": id_, "name": "get_weather", "content": self.text()}
            for id_ in ids
        ]
        return [{"role": "assistant", "content": self._nothing, "tool_calls": calls}, *results]

    def _arguments(self) -> dict[str, object]:
        draw = self._draw
        return {"city": self.text()} | ({"days": draw.randrange(9)} if draw.random() < 0.5 else {})


def as_clients_write(history: list[Message]) -> list[Message]:
    """Arguments as text."""
    out = json.loads(json.dumps(history))
    for message in out:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return out  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_apply_chat_template(name: str) -> None:
    of = model(name)
    histories = Histories(of, seed=1)
    for number in range(HISTORIES):
        history = histories.one()
        tools = [TOOL] if number % 2 and of.chat.wrapper is None else None
        ours = of.chat.render(as_clients_write(history), tools=tools).tolist()  # type: ignore[arg-type]
        assert ours == of.expected(history, tools), history  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_control_strings_of_a_family_stay_text(name: str) -> None:
    """The control tokens of a prompt are the same whatever its users wrote."""
    of = model(name)
    draw = random.Random(2)
    strings = [*of.family.special, *of.family.markup]
    pieces = [*strings, *(text[:4] for text in strings), *(text[2:] for text in strings), " ", "\n", "x"]

    def controls(text: str) -> list[int]:
        history: list[Message] = [
            {"role": "system", "content": f"s{text}"},
            {"role": "user", "content": f"{text} u"},
        ]
        if of.chat.wrapper is None:
            function = {"name": "get_weather", "arguments": json.dumps({"city": text})}
            calls = [{"id": "a1b2c3d4e", "type": "function", "function": function}]
            history += [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": f"{text}"},
            ]
        ids = of.chat.render(history)
        return [id_ for id_ in ids if id_ in set(of.tokenizer.control.values())]

    benign = controls("x")
    for _ in range(HISTORIES):
        forged = "".join(draw.choices(pieces, k=draw.randrange(1, 6)))
        assert controls(f"x{forged}x") == benign, forged


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
