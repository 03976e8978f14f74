"""A made-up server of one recorded turn, for the pure part of the client: it tells what was recorded, breaks
connections where it is told to, forgets events, dies and tells the rest anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentserve.client.protocol.events import Call, Event, TurnResult
from agentserve.client.protocol.flow import Broken, Means, Pause, Reply, Request, Retry
from agentserve.client.protocol.follow import Open, Read, Tell, TurnFlow
from agentserve.client.protocol.reader import Run
from tests.agents_rig import created
from tests.api_rig import Rig, hermes
from tests.client_rig import messages_of
from tests.fakes import ScriptedEngine, say

MEANS = Means(Retry(first=1.0, longest=4.0, patience=1e9), lambda: 0.5, lambda: "key")


@dataclass
class Told:
    """What a caller was told, and what was asked of it."""

    events: list[Event] = field(default_factory=list)
    run: list[Call] = field(default_factory=list)
    result: TurnResult | None = None


async def recorded() -> list[dict[str, Any]]:
    """The events of a turn that thinks, has two tools called, and answers."""
    calls = hermes("weather", '{"city": "Oslo"}') + hermes("now", "{}")

    def reply(submit: Any) -> Any:
        role = messages_of(submit)[-2][0]
        text = "<think>Hm, é.</think>I look. " + calls if role == "user" else "It rains."
        return say(text)

    rig = Rig(ScriptedEngine(reply))
    agent = await created(rig)
    await agent.say("Weather?")
    for call in reversed((await agent.until("requires_action"))["required_actions"]):
        await agent.give(call)
    await agent.until("idle")
    return agent.events()[1:]


@dataclass
class PastServer:
    """`cuts`: after how many events or bytes each connection breaks; the last one stays. `forgets(place)`:
    how many events are gone when somebody comes back at a place."""

    events: Sequence[dict[str, Any]]
    cuts: list[int] = field(default_factory=list)
    forgets: Callable[[int], int] = lambda place: place
    bytes_each: int = 10**9  # that a read gives
    cut_bytes: bool = False
    places: bool = True  # it says where a stream begins
    unheard: int = 0  # events that happen when the message comes, and no connection has told of them
    session: str = "sess_1"
    turn: str | None = None  # that the reply to the message names

    def __post_init__(self) -> None:
        self.name = self.events[0]["event_id"].rpartition("-")[0]
        self.first = int(self.events[0]["event_id"].rpartition("-")[2])
        self.now = 0  # events that have happened
        self.opened: list[str | None] = []
        self._pipe: list[tuple[bytes, int]] = []  # and how many events have happened then

    def id(self, index: int) -> str:
        return f"{self.name}-{self.first + index}"

    # --- answers -------------------------------------------------------------------------

    def open(self, request: Request) -> Reply:
        given = request.headers.get("last-event-id")
        self.opened.append(given)
        frames = [b": open\n\n"]
        if given is None:
            begin = self.now
        else:
            name, _, number = given.rpartition("-")
            begin = int(number) - self.first + 1 if name == self.name else -1
            gone = self.forgets(begin)
            if gone > begin:
                begin = max(0, gone)
                error = {"code": "events_lost", "message": "gone"}
                told = {"type": "error", "event_id": f"{self.id(begin - 1)}-events_lost", "error": error}
                frames.append(self._frame(begin - 1, told))
        frames += [self._frame(begin + i, event) for i, event in enumerate(self.events[begin:])]
        happened = [0] * (len(frames) - len(self.events[begin:])) + list(
            range(begin + 1, len(self.events) + 1)
        )
        cut = self.cuts.pop(0) if self.cuts else None
        self._pipe = []
        for frame, now in zip(frames, happened, strict=True):
            if self.cut_bytes and cut is not None:
                frame, cut = frame[:cut], cut - len(frame[:cut])
            elif cut is not None:
                frame, cut = (frame, cut - 1) if cut else (b"", 0)
            self._pipe += [
                (frame[i : i + self.bytes_each], now) for i in range(0, len(frame), self.bytes_each)
            ]
        headers = {"last-event-id": self.id(begin - 1)} if self.places else {}
        return Reply(200, headers, b"")

    def read(self) -> bytes | Broken:
        if not self._pipe:
            return Broken("cut")
        piece, now = self._pipe.pop(0)
        self.now = max(self.now, now)
        return piece

    def answer(self, request: Request) -> Reply:
        past = self.events[: self.now]
        turns = [event["turn"] for event in past if "turn" in event]
        begun = next(event["turn"] for event in self.events if "turn" in event)
        turn = dict(turns[-1]) if turns else dict(begun)
        if request.method == "POST":
            self.now = max(self.now, self.unheard)
            return Reply(202, {} if self.turn is None else {"x-turn-id": self.turn}, b"")
        if request.path.endswith("/items"):
            found: dict[str, Any] = {}
            for event in past:
                item = event.get("item")
                if item and (item["status"] != "in_progress" or item["type"] == "function_call"):
                    found[item["id"]] = item
            return _json({"data": list(found.values()), "has_more": False})
        if request.path.endswith("/turns"):
            return _json({"data": [turn]})
        if "/turns/" in request.path:
            return _json(turn)
        sessions = [event["session"] for event in past if "session" in event]
        return _json({**(sessions[-1] if sessions else {}), "id": self.session, "status": "in_progress"})

    def _frame(self, index: int, event: dict[str, Any]) -> bytes:
        data = json.dumps(event, ensure_ascii=False).encode()
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (self.id(index).encode(), event["type"].encode(), data)


def _json(value: Any) -> Reply:
    return Reply(200, {}, json.dumps(value).encode())


def drive(flow: TurnFlow, server: PastServer, *, after: PastServer | None = None) -> Told:
    """Run a turn on a server; `after`: the one that is there when a connection of the first breaks."""
    told = Told()
    answer: Any = None
    for _ in range(100_000):
        try:
            effect = flow.send(answer)
        except StopIteration as stop:
            told.result = stop.value
            return told
        answer = None
        match effect:
            case Open():
                answer = server.open(effect.request)
            case Read():
                answer = server.read()
                if isinstance(answer, Broken) and after is not None:
                    server, after = after, None
            case Tell():
                told.events.append(effect.event)
            case Run():
                told.run.append(effect.call)
            case Request():
                answer = server.answer(effect)
            case Pause():
                pass
    raise AssertionError("it does not end")
