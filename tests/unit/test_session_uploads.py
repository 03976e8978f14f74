"""Results that are uploaded while their tool still runs: told ahead, taken at their end."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator

import pytest

from agentserve.messages import ToolSignal, unpack_tokens
from agentserve.server.http.sessions.certain import Certain
from agentserve.server.http.sessions.growing import Growing
from agentserve.server.limits import Limits
from agentserve.types import TurnId
from tests.api_rig import Rig, settled
from tests.fakes import ScriptedEngine
from tests.waiting_sessions import Waiting, path, waiting
from tiering.policy.base import Signal


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


async def test_a_tool_that_pauses_often_costs_few_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []

    def none(*_: object, text: str, **__: object) -> array[int]:
        rendered.append(len(text))
        return array("i")

    monkeypatch.setattr(Certain, "tokens", none)
    s = await waiting()
    session = s.rig.context.directory.find(s.rig.engine.submits[0].session)
    assert session is not None
    grown = Growing(s.rig.context, session, s.calls[0])
    for size in range(256, 200_000, 256):
        grown.grown(["x" * size], size)
        if grown._timer is not None and not grown._timer.cancelled():
            grown._paused()  # the pause is over
        if grown._work is not None:
            await grown._work
    await grown.end()
    assert 10 < len(rendered) < 40
    assert sum(rendered) < 8 * 200_000


async def test_a_rendering_that_breaks_is_logged_once_and_the_result_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> array[int]:
        raise RuntimeError("a template's")

    monkeypatch.setattr(Certain, "tokens", broken)
    s = await waiting()
    upload = Upload(s, 0)
    for count in range(4):
        upload.pieces.put_nowait(b"rain " * 1000)
        await settled(lambda: caplog.records)
        assert len(caplog.records) == 1, count
    upload.pieces.put_nowait(None)
    assert (await upload.reply).json()["outstanding"] == [s.calls[1]]
    assert len(caplog.records) == 1


async def test_what_was_rendered_for_a_turn_that_is_over_is_not_told() -> None:
    s = await waiting()
    session = s.rig.context.directory.find(s.rig.engine.submits[0].session)
    assert session is not None
    first, second = (Growing(s.rig.context, session, s.calls[0]) for _ in range(2))
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


@pytest.mark.parametrize("end", [b"\xff", b"a" * 70000])
async def test_of_an_upload_that_failed_nothing_more_is_computed(end: bytes) -> None:
    s = await waiting(Rig(ScriptedEngine(), limits=Limits(body_bytes=65536)))
    upload = Upload(s, 0)
    upload.pieces.put_nowait(b"rain " * 200)
    await settled(lambda: len(news(s)) == 3)
    upload.pieces.put_nowait(end)
    upload.pieces.put_nowait(None)
    assert (await upload.reply).status_code in (400, 413)
    key, turn = s.rig.engine.submits[0].session, s.rig.engine.submits[0].turn
    assert news(s)[3:] == [ToolSignal(key, turn, Signal.BROKEN)]


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
