"""How much of a prompt and its reply the next prompt of the session begins with."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache

from tests.template_families import Model, model
from tests.template_histories import SEARCH, WEATHER, Message

SESSIONS, TURNS = 9, 6


@dataclass(frozen=True)
class Kept:
    """Of `turns` that go on from another, `whole` begin with all of its tokens; of those `tokens`, `kept`
    stand at the same place."""

    turns: int
    whole: int
    tokens: int
    kept: int


@cache
def measure(name: str, *, steadily: bool = False, wavering: bool = False, seed: int = 5) -> Kept:
    """Random sessions of an agent: texts and users, calls (one or several, with and without text and
    reasoning) and their results, users who speak up behind results. `wavering`: each request says anew
    whether its turn is to reason."""
    of = model(name, steadily)
    draw = random.Random(seed)
    turns = whole = tokens = kept = 0
    for number in range(3 if wavering else SESSIONS):
        session = _Session(of, draw, number, wavering)
        for _ in range(TURNS):
            before = session.prompt()
            before += session.goes_on()
            after = session.prompt()
            pairs = enumerate(zip(before, after, strict=False))
            same = next((at for at, (one, other) in pairs if one != other), min(len(before), len(after)))
            turns, whole = turns + 1, whole + (same == len(before))
            tokens, kept = tokens + len(before), kept + same
    return Kept(turns, whole, tokens, kept)


class _Session:
    def __init__(self, of: Model, draw: random.Random, number: int, wavering: bool) -> None:
        self._of, self._draw, self._wavering = of, draw, wavering
        self._tails: dict[int, str] = {}
        self._spliced: dict[int, list[int]] = {}
        self._tools = draw.choice([[WEATHER, SEARCH], [WEATHER, SEARCH], None])
        self._kwargs = draw.choice([{}, {"enable_thinking": True}, {"enable_thinking": False}])
        self._history: list[Message] = [{"role": "user", "content": f"task {number}"}]
        if draw.random() < 0.8:
            self._history.insert(0, {"role": "system", "content": "Be nice."})

    def prompt(self) -> list[int]:
        if self._wavering:
            thinks = self._draw.choice([None, True, False])
            self._kwargs = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        return self._of.chat.render(
            self._history,  # type: ignore[arg-type]
            tools=self._tools,  # type: ignore[arg-type]
            kwargs=self._kwargs,
            spliced=self._spliced,
            tails=self._tails,
        ).tolist()

    def goes_on(self) -> list[int]:
        """A turn is generated and its client sends what comes next. Returns the turn's ids."""
        draw = self._draw
        self._tails[len(self._history)] = self._of.chat.tail(
            self._history,  # type: ignore[arg-type]
            tools=self._tools,  # type: ignore[arg-type]
            kwargs=self._kwargs,
        )
        reply = [draw.randrange(256, 400) for _ in range(8)]
        self._spliced[len(self._history)] = reply
        turn: Message = {"role": "assistant", "content": "whatever it says"}
        if draw.random() < 0.4:
            turn["reasoning_content"] = "whatever it thought"
        self._history.append(turn)
        if draw.random() < 0.3:
            self._history.append({"role": "user", "content": f"more {len(self._history)}"})
            return reply
        count = draw.choice([1, 1, 2, 3]) if self._of.family.parallel else 1
        ids = ["".join(draw.choices("abcdefgh123", k=9)) for _ in range(count)]
        turn["content"] = draw.choice([None, None, "I look."])
        turn["tool_calls"] = [
            {
                "id": id_,
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": f"Bern {at}"})},
            }
            for at, id_ in enumerate(ids)
        ]
        self._history += [{"role": "tool", "tool_call_id": id_, "content": f"result {id_}"} for id_ in ids]
        if draw.random() < 0.15:
            self._history.append({"role": "user", "content": f"also {len(self._history)}"})
        return reply
