"""What a long history costs before a turn can be submitted: read, compared, rendered, encoded."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from agentserve.models.source import resolve
from agentserve.server.http import history
from agentserve.server.http.chat_request import render
from agentserve.server.http.schemas import ChatRequest, decode
from agentserve.server.limits import Limits
from agentserve.server.sessions.seats import chain_keys
from agentserve.server.text_port import JsonObject
from agentserve.server.wiring import chain
from agentserve.text import TextModel, load

WORDS = [
    "alpha",
    "river",
    "stone",
    "under",
    "light",
    "carries",
    "seven",
    "paper",
    "window",
    "slowly",
    "green",
    "engine",
    "before",
    "quiet",
]
QUESTION, ANSWER, RESULT = 150, 60, 600  # words


@dataclass(frozen=True, slots=True)
class HistoryFindings:
    tokens: int
    messages: int
    bytes: int
    cold: float  # seconds, of a history never seen
    known: tuple[float, ...]  # the same with one more message at the end, as a session's next turn is


def measure_history(model: str, tokens: int, runs: int) -> HistoryFindings:
    """A session of about so many tokens whose own answers are known by their ids."""
    text = load(resolve(model).path, None)
    rng = random.Random(1)
    messages: list[JsonObject] = [{"role": "system", "content": _words(rng, 300)}]
    spliced: dict[int, array[int]] = {}
    per_round = len(text.tokenizer.encode(_words(rng, QUESTION + ANSWER + RESULT)))
    for _ in range(max(tokens // per_round, 1)):
        messages.append({"role": "user", "content": _words(rng, QUESTION)})
        answer = _words(rng, ANSWER)
        spliced[len(messages)] = array("i", text.tokenizer.encode(answer))
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": _words(rng, RESULT)})
    body = _body(model, messages)
    count, cold = _timed(text, body, spliced)
    known: list[float] = []
    for run in range(runs):
        more = [*messages, {"role": "user", "content": f"Question {run}: {_words(rng, QUESTION)}"}]
        count, seconds = _timed(text, _body(model, more), spliced)
        known.append(seconds)
    return HistoryFindings(count, len(messages) + 1, len(body), cold, tuple(known))


def _timed(text: TextModel, body: bytes, spliced: Mapping[int, array[int]]) -> tuple[int, float]:
    began = time.perf_counter()
    limits = Limits()
    fields = decode(body, ChatRequest, limits)
    messages = history.message_dicts(fields.messages, limits)
    chain_keys(chain, messages)
    prompt = render(text.template, fields, messages, [], spliced)
    return len(prompt), time.perf_counter() - began


def _body(model: str, messages: list[JsonObject]) -> bytes:
    return msgspec.json.encode({"model": model, "messages": messages})


def _words(rng: random.Random, count: int) -> str:
    return " ".join(
        f"{rng.choice(WORDS)}{rng.randrange(100) if rng.random() < 0.1 else ''}" for _ in range(count)
    )
