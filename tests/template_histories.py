"""Random conversations that a family's template takes, and what a client sends of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tests.template_families import Model

Message = dict[str, object]

WORDS = (
    "Hello",
    " world",
    "\n",
    "  ",
    "12",
    "é",
    "👍",
    "{",
    '"',
    "\\",
    "'",
    "a|b",
    "You",
    ":",
    "nice.",
    "東京",
)
BLANKS = ("", " ", "\n")
Kwargs = dict[str, str | bool]
KWARGS: tuple[Kwargs, ...] = (
    *({}, {}, {"enable_thinking": True}, {"enable_thinking": False}),
    *({"thinking": True}, {"reasoning_effort": "high"}),
)
WEATHER: Message = {
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
SEARCH: Message = {
    "type": "function",
    "function": {
        "name": "search_files",
        "description": "Files that contain a text",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": 'say "what"'},
                "kind": {"type": "string", "enum": ["code", "prose"]},
                "within": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["text"],
        },
    },
}


class Histories:
    """Systems, texts, reasoning, calls (with text, several at once), results, blank contents."""

    def __init__(self, of: Model, seed: int) -> None:
        self._model = of
        self._draw = random.Random(seed)
        facts = of.chat.facts
        assert facts is not None
        self._facts = facts
        self._calls = of.chat.wrapper is None
        self._nothing = None if facts.null_content else ""

    def __iter__(self) -> Iterator[tuple[list[Message], list[Message] | None, Kwargs]]:
        while True:
            yield self.one(), self.tools(), self._draw.choice(KWARGS)

    def tools(self) -> list[Message] | None:
        offered = self._draw.choice([None, [WEATHER], [WEATHER, SEARCH]])
        return offered if self._facts.tools else None

    def text(self) -> str:
        if self._draw.random() < 0.08:
            return self._draw.choice(BLANKS)
        return "".join(self._draw.choices(WORDS, k=self._draw.randrange(1, 9)))

    def one(self) -> list[Message]:
        draw, history = self._draw, list[Message]()
        if draw.random() < 0.5:
            history.append({"role": "system", "content": self.text()})
        for _ in range(draw.randrange(1, 4)):
            history.append({"role": "user", "content": self.text()})
            for _ in range(draw.randrange(3) if self._calls else 0):
                history += self._called()
            history.append({"role": "assistant", "content": self.text()} | self._reasoning())
        if draw.random() < 0.8:
            history.append({"role": "user", "content": self.text()})
        else:
            history.pop()  # the last answer is still to come
        return history

    def _reasoning(self) -> Message:
        key = self._facts.reasoning
        return {key: self.text()} if key and self._draw.random() < 0.3 else {}

    def _called(self) -> list[Message]:
        draw = self._draw
        count = draw.randrange(1, 4) if self._model.family.parallel else 1
        ids = ["".join(draw.choices("abcdefgh123", k=9)) for _ in range(count)]
        calls = [{"id": id_, "type": "function", "function": self._function()} for id_ in ids]
        results = [
            {"role": "tool", "tool_call_id": id_, "name": call["function"]["name"], "content": self.text()}  # type: ignore[index]
            for id_, call in zip(ids, calls, strict=True)
        ]
        text = self.text() if draw.random() < 0.3 else self._nothing
        message = {"role": "assistant", "content": text or self._nothing, "tool_calls": calls}
        if self._facts.reasoning != "thinking" or text == self._nothing:  # gpt-oss takes one of the two
            message |= self._reasoning()
        return [message, *results]

    def _function(self) -> Message:
        draw = self._draw
        if draw.random() < 0.5:
            days: Message = {"days": draw.randrange(9)} if draw.random() < 0.5 else {}
            return {"name": "get_weather", "arguments": {"city": self.text()} | days}
        within = [self.text() for _ in range(draw.randrange(3))]
        return {"name": "search_files", "arguments": {"text": self.text(), "within": within}}


def as_clients_write(history: list[Message]) -> list[Message]:
    """Arguments as text, reasoning by its name in the API."""
    out = json.loads(json.dumps(history))
    for message in out:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if "thinking" in message:
            message["reasoning_content"] = message.pop("thinking")
    return out  # type: ignore[no-any-return]


def as_templates_read(of: Model, history: list[Message], kwargs: Kwargs) -> list[Message]:
    """Ids of calls as the family has them, answers behind their reasoning where Hermes 4 thinks. Arguments
    as text for those templates that want them so; these do not take a message without content either, which
    is what `transformers` makes of null. Without replies that say nothing, for those templates that refuse
    them."""
    assert of.chat.facts is not None
    if not of.chat.facts.empty_reply:
        history = [message for message in history if not _empty(of, message)]
    if "hermes-4" in of.family.file.lower() and kwargs.get("thinking"):
        return [_with_reasoning(message) for message in history]
    if of.family.numbers_calls:
        return _numbered(history)
    if not of.chat.facts.string_arguments:
        return history
    return [message | {"content": message["content"] or ""} for message in as_clients_write(history)]


def _empty(of: Model, message: Message) -> bool:
    reasoning = of.chat.facts.reasoning and message.get(of.chat.facts.reasoning)
    return message["role"] == "assistant" and not (
        message["content"] or message.get("tool_calls") or reasoning
    )


def _with_reasoning(message: Message) -> Message:
    if message["role"] != "assistant" or not message["content"]:
        return message
    thought = message.get("reasoning_content", "")
    return message | {"content": f"<think>{thought}</think>{message['content']}"}


def _numbered(history: list[Message]) -> list[Message]:
    text = json.dumps(history)
    calls = [call for message in history for call in message.get("tool_calls") or ()]  # type: ignore[attr-defined]
    for number, call in enumerate(calls):
        text = text.replace(f'"{call["id"]}"', f'"functions.{call["function"]["name"]}:{number}"')
    return json.loads(text)  # type: ignore[no-any-return]
