"""A request that comes twice with one Idempotency-Key runs once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.http.idempotency import KeptBounds, KeptReply, Replies, Shared
from agentserve.types import FinishReason
from tests.admins_rig import KEYS, Admins
from tests.api_rig import CHAT, Rig, settled, user
from tests.fakes import Script, ScriptedEngine, say
from tests.responses_rig import RESPONSES, checked, parsed
from tests.tenants_rig import with_key

KEY = {"idempotency-key": "k1"}
BODY = {"messages": [user("a")]}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_gets_the_first_one_s_answer(stream: bool) -> None:
    rig = Rig()
    body = BODY | {"stream": stream}
    first = await rig.post(CHAT, body, KEY)
    again = await rig.post(CHAT, body, KEY)
    assert first.status_code == again.status_code == 200
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    for name in ("content-type", "x-session-id"):
        assert again.headers[name] == first.headers[name]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert len(rig.engine.submits) == 1
    assert (await rig.session(first.headers["x-session-id"]))["turns"] == 1


async def test_without_a_key_every_request_runs() -> None:
    rig = Rig()
    for _ in range(2):
        await rig.post(CHAT, BODY)
    await rig.post(CHAT, BODY, KEY)
    await rig.post(CHAT, BODY, {"idempotency-key": "k2"})
    assert len(rig.engine.submits) == 4


async def test_a_key_is_one_tenant_s_and_one_route_s(tmp_path: Path) -> None:
    rig = Admins(tmp_path)
    one, two = [with_key((await rig.made(name))["key"]) for name in ("acme", "other")]
    for number, mine in enumerate((one, two, one)):
        reply = await rig.post(CHAT, BODY, KEY | mine)
        assert (reply.status_code, "idempotent-replayed" in reply.headers) == (200, number == 2)
    assert len(rig.engine.submits) == 2
    await rig.post("/v1/completions", {"prompt": "a"}, KEY | one)
    assert len(rig.engine.submits) == 3
    refused = await rig.post(CHAT, BODY, KEY | {"authorization": "Bearer three"})
    assert refused.status_code == 401


@pytest.mark.parametrize("grace", [0, 60])
async def test_a_retry_with_the_key_that_took_the_other_s_place_runs_nothing(
    tmp_path: Path, grace: int
) -> None:
    rig = Admins(tmp_path)
    made = await rig.made("acme")
    first = await rig.post(CHAT, BODY, KEY | with_key(made["key"]))
    fresh = (await rig.ask("POST", f"{KEYS}/{made['id']}/rotate", {"grace_seconds": grace})).json()["key"]
    again = await rig.post(CHAT, BODY, KEY | with_key(fresh))
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    old = await rig.post(CHAT, BODY, KEY | with_key(made["key"]))
    assert old.status_code == (200 if grace else 401)
    assert len(rig.engine.submits) == 1


async def test_another_request_under_the_same_key_is_refused() -> None:
    rig = Rig()
    await rig.post(CHAT, BODY, KEY)
    reply = await rig.post(CHAT, {"messages": [user("b")]}, KEY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert reply.headers["x-should-retry"] == "false"
    assert len(rig.engine.submits) == 1


async def test_while_the_first_runs_the_second_is_told_to_come_back() -> None:
    script = say("Hello!", hold_at=2)
    rig = Rig(ScriptedEngine(script))
    first = asyncio.create_task(rig.post(CHAT, BODY, KEY))
    await settled(lambda: rig.engine.submits)
    reply = await rig.post(CHAT, BODY, KEY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "idempotent_request_running")
    assert (reply.headers["x-should-retry"], reply.headers["retry-after"]) == ("true", "1")
    script.release.set()
    done = await first
    assert (await rig.post(CHAT, BODY, KEY)).content == done.content
    assert len(rig.engine.submits) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_is_not_kept(stream: bool) -> None:
    scripts = iter([Script([72, 105], reason=FinishReason.ERROR, error="it broke"), say("Hello!")])
    rig = Rig(ScriptedEngine(lambda submit: next(scripts)))
    body = BODY | {"stream": stream}
    await rig.post(CHAT, body, KEY)
    reply = await rig.post(CHAT, body, KEY)
    assert reply.status_code == 200
    assert b"error" not in reply.content
    assert len(rig.engine.submits) == 2


async def test_a_run_in_the_background_is_one_and_both_read_it() -> None:
    script = say("Hello!", hold_at=3)
    rig = Rig(ScriptedEngine(script))
    body = {"model": "tiny", "input": "x", "stream": True, "background": True}
    first = asyncio.create_task(rig.post(RESPONSES, body, KEY))
    await settled(lambda: rig.engine.submits)
    beside = asyncio.create_task(rig.post(RESPONSES, body, KEY))  # while the first reads
    await asyncio.sleep(0.01)
    first.cancel()  # its connection breaks
    await asyncio.gather(first, return_exceptions=True)
    after = asyncio.create_task(rig.post(RESPONSES, body, KEY))
    other = await rig.post(RESPONSES, body | {"input": "y"}, KEY)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    await asyncio.sleep(0.01)
    script.release.set()
    answers = [await beside, await after, await rig.post(RESPONSES, body, KEY)]
    for answer in answers:
        assert answer.headers["idempotent-replayed"] == "true"
        assert checked(parsed(answer.content))["status"] == "completed"
        assert answer.content == answers[0].content
        assert answer.headers["x-session-id"] == answers[0].headers["x-session-id"]
    assert len(rig.engine.submits) == 1
    [kept] = rig.context.responses.shelf
    await rig.client.delete(f"{RESPONSES}/{kept.id}")
    assert (await rig.post(RESPONSES, body, KEY)).status_code == 404
    assert len(rig.engine.submits) == 1
    rig.check_rest()


def test_a_shared_run_is_kept_while_it_runs() -> None:
    async def answer(request: Request) -> Response:
        raise AssertionError

    runs = True
    replies = Replies(KeptBounds(seconds=10, answers=2))
    replies.keep(key(0), Shared(b"", answer, lambda: runs, 0.0))
    for number in range(1, 5):
        replies.keep(key(number), reply(1.0))
    assert len(replies) == 2
    assert replies.get(key(0), 100.0) is not None
    assert replies.get(key(4), 100.0) is None
    runs = False
    assert replies.get(key(0), 109.0) is not None  # as long as any answer
    assert replies.get(key(0), 110.0) is None
    assert len(replies) == 0


@pytest.mark.parametrize("key", ["", "x" * 257])
async def test_a_bad_key_is_refused(key: str) -> None:
    reply = await Rig().post(CHAT, BODY, {"idempotency-key": key})
    assert reply.status_code == 400


def reply(at: float, size: int = 10) -> KeptReply:
    return KeptReply(b"", 200, (), bytes(size), at)


def key(number: int) -> Any:
    return ("/v1/x", str(number), b"")


def test_answers_are_bounded_in_number_bytes_and_age() -> None:
    replies = Replies(KeptBounds(seconds=10, answers=3, bytes=100))
    for number in range(5):
        replies.keep(key(number), reply(0.0))
    assert len(replies) == 3
    assert replies.get(key(1), 1.0) is None
    assert replies.get(key(4), 1.0) is not None
    replies.keep(key(9), reply(5.0, 95))
    assert len(replies) == 1
    replies.keep(key(9), reply(5.0, 50))
    replies.keep(key(10), reply(6.0, 50))
    assert len(replies) == 2
    assert replies.get(key(9), 14.9) is not None
    assert replies.get(key(9), 15.0) is None
    assert len(replies) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_that_is_said_again_has_the_ids_of_its_own_request(stream: bool) -> None:
    rig = Rig()
    body = BODY | {"max_tokens": 9, "stream": stream}
    first = await rig.post("/v1/messages", body, KEY)
    again = await rig.post("/v1/messages", body, KEY)
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    for reply in (first, again):
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert again.headers["request-id"] != first.headers["request-id"]


async def test_the_messages_routes_are_told_in_their_shape() -> None:
    reply = await Rig().post("/v1/messages", {}, {"idempotency-key": "k" * 300})
    assert reply.status_code == 400
    assert (reply.json()["type"], reply.json()["error"]["type"]) == ("error", "invalid_request_error")
