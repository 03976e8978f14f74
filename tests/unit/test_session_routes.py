"""Forks, hints, uploads, events and expiry of sessions, on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentserve.messages import Hint, ToolSignal, unpack_tokens
from agentserve.server.http.app import create_app
from agentserve.server.http.context import ServerOptions
from agentserve.server.http.hermes_calls import HermesParser
from agentserve.server.http.sessions.ahead import Ahead
from agentserve.server.limits import Limits
from agentserve.types import FinishReason, TurnId
from tests.api_rig import TOOLS, Rig, hermes, settled, user
from tests.fakes import END, EOS, ByteTemplate, ByteTokenizer, NoGrammars, Script, ScriptedEngine, chain, say
from tests.sse import parse
from tests.unit.test_session_results import Waiting, waiting
from tiering.policy.base import Hints, Signal


def path(name: str, rest: str) -> str:
    return f"/agentserve/sessions/{name}/{rest}"


async def spoken(rig: Rig) -> tuple[str, list[dict[str, Any]]]:
    """A session of three turns, and its messages."""
    messages: list[dict[str, Any]] = []
    name = ""
    for word in ("one", "two", "three"):
        rig.engine.reply = say(f"I say {word}.")
        reply = await rig.chat([*messages, user(word)])
        name = reply["session_id"]
        messages += [user(word), {"role": "assistant", "content": f"I say {word}."}]
    return name, messages


# --- forks ------------------------------------------------------------------------------------


async def test_a_fork_shares_history_and_goes_its_own_way() -> None:
    rig = Rig()
    name, messages = await spoken(rig)
    reply = await rig.post(path(name, "fork"), b"")
    assert reply.status_code == 201
    child = reply.json()
    assert (child["parent"], child["state"], child["messages"], child["turns"]) == (name, "IDLE", 6, 3)
    parent_key = rig.engine.submits[0].session
    [(source, child_key, length)] = rig.engine.forked
    assert (source, length) == (parent_key, child["tokens"])
    rig.engine.reply = say("Child.")
    went = await rig.chat([*messages, user("four")], session_id=child["id"])
    assert went["session_id"] == child["id"]
    assert rig.engine.submits[-1].session == child_key
    rig.engine.reply = say("Parent.")
    went = await rig.chat([*messages, user("four")], session_id=name)
    assert went["session_id"] == name
    assert rig.engine.submits[-1].tokens == rig.engine.submits[-2].tokens
    rig.check_rest()


async def test_a_fork_at_an_earlier_turn() -> None:
    rig = Rig()
    name, messages = await spoken(rig)
    child = (await rig.post(path(name, "fork"), {"at_turn": 2})).json()
    assert (child["messages"], child["turns"]) == (4, 2)
    rig.engine.reply = say("Otherwise.")
    went = await rig.chat([*messages[:4], user("else")], session_id=child["id"])
    assert went["session_id"] == child["id"]
    prompt, before = (unpack_tokens(rig.engine.submits[i].tokens) for i in (-1, 1))
    assert prompt[: len(before)] == before
    assert (await rig.session(name))["turns"] == 3
    again = (await rig.post(path(child["id"], "fork"), {"at_turn": 0})).json()
    assert again["messages"] == 4


@pytest.mark.parametrize("body", [{"at_turn": 9}, {"at_turn": -1}, {"at_turn": "x"}, [], "[[["])
async def test_a_bad_fork_makes_no_session(body: Any) -> None:
    rig = Rig()
    name, _ = await spoken(rig)
    reply = await rig.post(path(name, "fork"), body)
    assert reply.status_code == 400, reply.text
    assert len(rig.context.directory) == 1
    assert not rig.engine.forked


async def test_fork_and_parent_wait_for_the_same_calls_apart() -> None:
    s = await waiting()
    await s.give(0, "rain")
    child = (await s.rig.post(path(s.id, "fork"), {})).json()
    assert child["state"] == "WAITING_TOOL"
    assert child["pending_tool_calls"] == s.calls
    assert s.rig.engine.parked[-1] == (s.rig.engine.forked[0][1], 0, True)
    assert s.rig.engine.tools[-1] == ("weather", "now")
    other = Waiting(s.rig, {"session_id": child["id"], "choices": [{"message": s.message}]})
    s.rig.engine.reply = say("Child.")
    went = await other.post([{"call_id": call, "content": "snow"} for call in s.calls])
    assert went.json()["session_id"] == child["id"]
    assert "snow" in s.last_prompt()
    view = await s.rig.session(s.id)
    assert view["state"] == "WAITING_TOOL"
    assert [call["result_taken"] for call in view["pending_tool_calls"]] == [True, False]
    assert (await s.give(1, "noon")).json()["session_id"] == s.id
    assert "snow" not in s.last_prompt()
    for name in (s.id, child["id"]):
        await s.rig.client.delete(f"/agentserve/sessions/{name}")
    assert len(s.rig.context.directory) == 0
    assert s.rig.context.chronicle.transcripts.size_bytes == 0


async def test_chat_results_without_a_name_go_to_the_one_that_made_the_calls() -> None:
    s = await waiting()
    child = (await s.rig.post(path(s.id, "fork"), {})).json()
    history = [user("Weather?"), s.message]
    history += [{"role": "tool", "tool_call_id": call, "content": "x"} for call in s.calls]
    assert (await s.rig.chat(history, tools=TOOLS))["session_id"] == s.id
    assert (await s.rig.chat(history, tools=TOOLS, session_id=child["id"]))["session_id"] == child["id"]
    assert (await s.rig.session(s.id))["turns"] == 2


async def test_nobody_gets_into_a_fork_without_its_name() -> None:
    """A client that knows nothing of the fork goes on where it was, also while that is busy."""
    rig = Rig()
    name, messages = await spoken(rig)
    child = (await rig.post(path(name, "fork"), {})).json()
    rig.engine.reply = held = say("Slow.", hold_at=0)
    turn = asyncio.create_task(rig.chat([*messages, user("four")]))
    await settled(lambda: rig.engine.live)
    rig.engine.reply = say("Beside.")
    beside = await rig.chat([*messages, user("five")])
    held.release.set()
    assert (await turn)["session_id"] == name
    assert beside["session_id"] not in (name, child["id"])
    assert (await rig.session(child["id"]))["messages"] == 6
    rig.engine.reply = held = say("Slow.", hold_at=0)
    turn = asyncio.create_task(rig.chat([*messages, user("six")], session_id=child["id"]))
    await settled(lambda: rig.engine.live)
    rig.engine.reply = say("Beside.")
    beside = await rig.chat([*messages, user("seven")], session_id=child["id"])
    held.release.set()
    assert (await turn)["session_id"] == child["id"]
    assert beside["session_id"] not in (name, child["id"])
    assert (await rig.session(name))["turns"] == 4
    rig.check_rest()


async def test_a_fork_at_a_turn_that_made_calls_waits_for_them() -> None:
    s = await waiting()
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    child = (await s.rig.post(path(s.id, "fork"), {"at_turn": 1})).json()
    assert (child["state"], child["pending_tool_calls"]) == ("WAITING_TOOL", s.calls)
    s.rig.engine.reply = say("Other.")
    reply = await s.rig.post(
        path(child["id"], "tool_results"), [{"call_id": call, "content": "y"} for call in s.calls]
    )
    assert reply.json()["choices"][0]["message"]["content"] == "Other."
    s.rig.check_rest()


async def test_a_session_without_a_turn_cannot_be_forked() -> None:
    rig = Rig(ScriptedEngine(say("Slow.", hold_at=0)))
    turn = asyncio.create_task(rig.chat([user("a")], session_id="new"))
    await settled(lambda: rig.engine.live)
    reply = await rig.post(path("new", "fork"), {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "nothing_to_fork")
    rig.engine.reply.release.set()  # type: ignore[union-attr]
    await turn


# --- hints ------------------------------------------------------------------------------------


async def test_hints_reach_the_worker_and_get_receipts() -> None:
    s = await waiting()
    key = s.rig.engine.submits[0].session
    sent = {"expected_wait": 2.5, "priority": 99, "retain": "all", "nonsense\u2028": 1}
    reply = await s.rig.post(path(s.id, "hints"), sent)
    receipts = reply.json()["receipts"]
    assert receipts["expected_wait"] == {"status": "accepted", "value": 2.5, "reason": ""}
    assert (receipts["priority"]["status"], receipts["priority"]["value"]) == ("clipped", 2)
    assert receipts["retain"]["status"] == receipts["nonsense\u2028"]["status"] == "rejected"
    assert s.rig.engine.news == [Hint(key, Hints(expected_wait=2.5, priority=2))]
    story = await followed(s.rig, s.id)
    assert [event.data["receipts"] for event in story if event.kind == "hints"] == [receipts]


@pytest.mark.parametrize("body", ["", "[]", "null", "7", "{", '{"a": NaN}', "[" * 1000])
async def test_bad_hints_are_a_400(body: str) -> None:
    s = await waiting()
    assert (await s.rig.post(path(s.id, "hints"), body)).status_code == 400
    assert s.rig.engine.news == []


async def test_a_flood_of_hints_gets_a_bounded_answer() -> None:
    s = await waiting()
    reply = await s.rig.post(path(s.id, "hints"), {f"{i:0100}": -1e308 for i in range(5000)})
    assert reply.status_code == 200
    assert len(reply.content) < 10_000
    assert s.rig.engine.news == []  # what is rejected is as if it had not been said


# --- uploads ----------------------------------------------------------------------------------


class Upload:
    """A body that is sent piece by piece, when the test says so."""

    def __init__(self, s: Waiting, index: int, query: str = "") -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        target = path(s.id, f"tool_results/{s.calls[index]}/stream{query}")
        self.reply = asyncio.create_task(s.rig.client.post(target, content=self._body()))

    async def _body(self) -> AsyncIterator[bytes]:
        while (piece := await self.pieces.get()) is not None:
            yield piece


def news(s: Waiting) -> list[ToolSignal]:
    return [item for item in s.rig.engine.news if isinstance(item, ToolSignal)]


async def test_an_upload_is_told_ahead_and_becomes_a_result_at_its_end() -> None:
    s = await waiting()
    key, turn = s.rig.engine.submits[0].session, s.rig.engine.submits[0].turn
    upload = Upload(s, 0)
    await settled(lambda: news(s))
    assert news(s) == [ToolSignal(key, turn, Signal.CONNECTED)]
    upload.pieces.put_nowait(b"Regen, "[:3])
    await settled(lambda: len(news(s)) == 2)
    assert news(s)[1] == ToolSignal(key, turn, Signal.STREAMING)
    upload.pieces.put_nowait(b"en, " + b"rain " * 200)
    await settled(lambda: len(news(s)) == 3)
    assert not (await s.rig.session(s.id))["pending_tool_calls"][0]["result_taken"]
    upload.pieces.put_nowait("täglich".encode()[:2])  # half a character
    upload.pieces.put_nowait("täglich".encode()[2:])
    upload.pieces.put_nowait(None)
    assert (await upload.reply).json()["outstanding"] == [s.calls[1]]
    await s.give(1, "noon")
    said = unpack_tokens(news(s)[2].tokens)
    prompt = unpack_tokens(s.rig.engine.submits[-1].tokens)
    assert said == prompt[: len(said)]  # what was computed ahead is used, all of it
    assert len(said) > len(unpack_tokens(s.rig.engine.submits[0].tokens)) + 1000
    assert "Regen, rain" in s.last_prompt()
    assert "rain täglich" in s.last_prompt()


async def test_what_has_come_is_told_when_the_tool_pauses() -> None:
    s = await waiting()
    upload = Upload(s, 0)
    upload.pieces.put_nowait(b"rain " * 120)  # enough to be told at once
    await settled(lambda: len(news(s)) == 3)
    upload.pieces.put_nowait(b"wind " * 60)  # too little growth, but nothing comes after it
    await settled(lambda: len(news(s)) == 4)
    upload.pieces.put_nowait(b"sun")  # not worth it
    upload.pieces.put_nowait(None)
    await upload.reply
    await s.give(1, "noon")
    prompt = unpack_tokens(s.rig.engine.submits[-1].tokens)
    first, second = (unpack_tokens(item.tokens) for item in news(s)[2:])
    assert len(second) >= len(first) + 300
    assert first == prompt[: len(first)]
    assert second == prompt[: len(second)]
    assert len(news(s)) == 4


async def test_of_a_prompt_that_is_too_long_no_more_is_told() -> None:
    s = await waiting()
    most = s.rig.engine.hello.max_model_len
    upload = Upload(s, 0)
    for text in (b"rain ", b"wind ", b"snow "):
        upload.pieces.put_nowait(text * (most // 4))
        await settled(lambda: len(news(s)) >= 3)
        await asyncio.sleep(0)
    upload.pieces.put_nowait(None)
    await upload.reply
    assert len(unpack_tokens(news(s)[-1].tokens)) == most, "it hears that there is nothing to compute"
    assert len(news(s)) == 3


async def test_what_was_rendered_for_a_turn_that_is_over_is_not_told() -> None:
    s = await waiting()
    session = s.rig.context.directory.find(s.rig.engine.submits[0].session)
    assert session is not None
    first, second = (Ahead(s.rig.context, session, s.calls[0]) for _ in range(2))
    first.grown(["rain " * 200], 1000)
    session.engine_turn = TurnId(7)  # the worker reports another turn while the text is being rendered
    second.grown(["wind " * 200], 1000)
    await settled(lambda: news(s))
    await second.end()
    await first.end()
    assert [item.turn for item in news(s)] == [7]
    told = bytes(token for token in unpack_tokens(news(s)[0].tokens) if token < 256)
    assert told.count(b"wind") > 100


async def test_of_a_later_call_nothing_is_told_ahead_but_that_it_comes() -> None:
    s = await waiting()
    upload = Upload(s, 1)
    upload.pieces.put_nowait(b"noon " * 300)
    upload.pieces.put_nowait(None)
    await upload.reply
    assert [(item.signal, item.tokens) for item in news(s)] == [
        (Signal.CONNECTED, b""),
        (Signal.STREAMING, b""),
    ]


async def test_the_last_upload_streams_the_turn() -> None:
    s = await waiting()
    await s.give(1, "noon")
    upload = Upload(s, 0, "?stream=true&epoch=0&max_tokens=2")
    upload.pieces.put_nowait(b"rain")
    upload.pieces.put_nowait(None)
    reply = await upload.reply
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.content.endswith(b"data: [DONE]\n\n")
    assert s.rig.engine.submits[-1].sampling.max_tokens == 2


@pytest.mark.parametrize(
    ("content", "status", "code"), [(b"\xff", 400, "invalid_text"), (b"a" * 70000, 413, "request_too_large")]
)
async def test_a_bad_upload_takes_nothing(content: bytes, status: int, code: str) -> None:
    s = await waiting(Rig(ScriptedEngine(), limits=Limits(body_bytes=65536)))
    reply = await s.rig.client.post(path(s.id, f"tool_results/{s.calls[0]}/stream"), content=content)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert not (await s.rig.session(s.id))["pending_tool_calls"][0]["result_taken"]


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("?epoch=7", 409, "stale_epoch"),
        ("?epoch=-1", 400, "invalid_value"),
        ("?epoch=1e9", 400, "invalid_value"),
    ],
)
async def test_an_upload_that_cannot_be_taken_is_refused_at_once(query: str, status: int, code: str) -> None:
    s = await waiting()
    upload = Upload(s, 0, query)  # of which nothing is ever sent
    upload.pieces.put_nowait(None)
    reply = await upload.reply
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert not s.rig.engine.news


async def test_an_upload_for_a_call_that_was_answered_meanwhile() -> None:
    s = await waiting()
    same, other = Upload(s, 0), Upload(s, 0)
    for upload in (same, other):
        upload.pieces.put_nowait(b"ra")
    await settled(lambda: len(news(s)) == 4)
    await s.give(0, "rain")
    same.pieces.put_nowait(b"in")
    other.pieces.put_nowait(b"ging sun")
    for upload in (same, other):
        upload.pieces.put_nowait(None)
    assert (await same.reply).json()["results"][0]["status"] == "repeated"
    assert (await other.reply).json()["error"]["code"] == "result_conflict"


# --- events -----------------------------------------------------------------------------------


async def followed(rig: Rig, name: str, query: str = "", **headers: str) -> list[Any]:
    """All events of a session that is being closed: the stream has an end then."""
    asked = asyncio.create_task(rig.client.get(path(name, f"events{query}"), headers=headers))
    log = rig.context.chronicle.events.of(rig.context.directory.get("default", name).key)
    await settled(lambda: log.waited_for)
    await rig.client.delete(f"/agentserve/sessions/{name}")
    reply = await asked
    assert reply.status_code == 200
    blocks = reply.content.split(b"\n\n")
    assert blocks.pop() == b""
    return [event for event in map(parse, blocks) if event is not None]


async def test_events_tell_the_whole_story_whichever_way_its_turns_came() -> None:
    s = await waiting()
    await s.give(1, "noon")
    await s.give(0, "rain")
    story = await followed(s.rig, s.id)
    kinds = [event.kind for event in story]
    assert [event.number for event in story] == list(range(1, len(story) + 1))
    calls = [event.data for event in story if event.kind == "tool_call"]
    assert [(call["call_id"], call["name"], call["epoch"]) for call in calls] == [
        (s.calls[0], "weather", 0),
        (s.calls[1], "now", 0),
    ]
    states = [event.data["state"] for event in story if event.kind == "state"]
    assert states[-1] == "IDLE"
    assert "WAITING_TOOL" in states
    for turn, text in ((1, ""), (2, "It rains.")):
        deltas = [event.data for event in story if event.kind == "delta" and event.data["turn"] == turn]
        assert "".join(delta.get("content", "") for delta in deltas) == text
    pieces = [piece for event in story if event.kind == "delta" for piece in event.data.get("tool_calls", ())]
    for index, call in enumerate(calls):
        joined = "".join(piece["arguments"] for piece in pieces if piece["index"] == index)
        assert joined == call["arguments"]
    results = [event.data for event in story if event.kind == "tool_result"]
    assert [result["call_id"] for result in results] == [s.calls[1], s.calls[0]]
    assert kinds.count("turn_started") == kinds.count("turn_completed") == 2
    assert kinds.index("turn_started") < kinds.index("delta") < kinds.index("turn_completed")
    assert kinds[-1] == "closed"


async def test_a_rolled_back_turn_is_told_and_so_is_its_epoch() -> None:
    s = await waiting()
    s.rig.engine.reply = Script(list(b"It"), FinishReason.ERROR, "the worker broke")
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    story = await followed(s.rig, s.id)
    [undone] = [event.data for event in story if event.kind == "turn_rolled_back"]
    assert undone == {"turn": 2, "epoch": 1, "reason": "the worker broke"}
    after = [event.data["state"] for event in story if event.kind == "state"]
    assert after[-1] == "WAITING_TOOL"


async def test_a_stream_is_taken_up_after_the_last_event() -> None:
    s = await waiting()
    name = s.rig.context.chronicle.events.of(s.rig.engine.submits[0].session).name
    story = await followed(s.rig, s.id, f"?after={name}-3", **{"last-event-id": f"{name}-5"})
    assert story[0].number == 6


@pytest.mark.parametrize("after", ["x", "-1", "1-", "1-1-1", "é", "1" * 200])
async def test_a_bad_event_id_is_a_400(after: str) -> None:
    s = await waiting()
    reply = await s.rig.client.get(path(s.id, "events"), params={"after": after})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_event_id")


async def test_a_turn_that_nobody_reads_costs_no_more_than_the_bound() -> None:
    s = await waiting()
    log = s.rig.context.chronicle.events.of(s.rig.engine.submits[0].session)
    s.rig.engine.reply = say("x" * 3000)
    await s.post([{"call_id": call, "content": "x"} for call in s.calls])
    assert log.size_bytes <= 256 << 10
    assert log.last > 3000
    assert log.first > 1


# --- expiry -----------------------------------------------------------------------------------


class Clock:
    time = 1000.0

    def now(self) -> float:
        return self.time


async def test_idle_sessions_expire_and_waiting_ones_do_not() -> None:
    clock = Clock()
    engine = ScriptedEngine()
    rig = Rig(engine)
    rig.app = create_app(
        engine,
        ServerOptions(model="tiny", session_ttl_seconds=60.0, tool_wait_seconds=600.0),
        tokenizer=ByteTokenizer(),
        template=ByteTemplate(),
        end_ids=(END, EOS),
        chain=chain,
        tool_parser=HermesParser,
        grammar_maker=NoGrammars(),
        clock=clock,
    )
    rig.client._transport.app = rig.app  # type: ignore[attr-defined]
    idle = (await rig.chat([user("a")]))["session_id"]
    engine.reply = say(hermes("now", "{}"))
    asking = (await rig.chat([user("b")], tools=TOOLS))["session_id"]
    clock.time += 59
    await rig.session(idle)
    clock.time += 2
    assert (await rig.client.get(f"/agentserve/sessions/{idle}")).status_code == 404
    assert engine.closed == [engine.submits[0].session]
    assert (await rig.session(asking))["state"] == "WAITING_TOOL"
    clock.time += 600
    listed = json.loads((await rig.client.get("/agentserve/sessions")).content)
    assert listed["data"] == []
    assert len(rig.context.chronicle.transcripts) == len(rig.context.chronicle.events) == 0
