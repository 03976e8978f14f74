"""What a small request to the Responses API may come to."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from agentserve.server.errors import ApiError
from agentserve.server.http.chat_request import prepare
from agentserve.server.http.responses import job, thoughts
from agentserve.server.http.responses.desk import Desk, DeskBounds
from agentserve.server.http.responses.thoughts import Room, packed, unpacked
from agentserve.server.limits import Limits
from tests.api_rig import Rig, user
from tests.fakes import ScriptedEngine, say
from tests.responses_rig import Client


@pytest.fixture
def client() -> Client:
    limits = Limits(expanded_bytes=10_000, history_bytes=50_000)
    return Client(Rig(ScriptedEngine(say("Hello!"), max_model_len=1 << 17), limits=limits))


def reasoning(content: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "encrypted_content": content}


class Counting:
    """zlib, counting what it unpacks."""

    def __init__(self) -> None:
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(zlib, name)

    def decompressobj(self) -> Any:
        inner, outer = zlib.decompressobj(), self

        class Unpacker:
            eof = property(lambda self: inner.eof)

            def decompress(self, data: bytes, most: int) -> bytes:
                found = inner.decompress(data, most)
                outer.bytes += len(found)
                return found

        return Unpacker()


async def test_packed_reasoning_is_unpacked_within_one_bound(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting()
    monkeypatch.setattr(thoughts, "zlib", counting)
    bomb = "as1." + base64.b64encode(zlib.compress(b"a" * 6000)).decode()
    given = [part for _ in range(20) for part in (reasoning(bomb), user("x"))]
    error = await client.refused(given, store=False)
    assert (error["code"], error["param"]) == ("input_too_large", "input")
    assert counting.bytes <= 10_001
    broken = "as1." + base64.b64encode(zlib.compress(b"a" * 6000)[:-4]).decode()  # it counts all the same
    error = await client.refused([reasoning(broken), user("x"), reasoning(broken), user("x")], store=False)
    assert error["code"] == "input_too_large"
    assert not client.rig.engine.submits
    await client.create([reasoning(bomb), user("x")], store=False)


def test_what_there_is_room_for_is_unpacked() -> None:
    room = Room(10)
    assert unpacked(packed("12345"), room) == "12345"
    assert unpacked(packed("67890"), room) == "67890"
    with pytest.raises(ApiError, match="10 bytes"):
        unpacked(packed("1"), room)


async def test_references_come_to_no_more_than_a_bound(client: Client) -> None:
    first = await client.create("x", says="y" * 3000)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    kept = client.rig.context.responses.shelf.size_bytes
    error = await client.refused([reference] * 200)
    assert error["code"] == "input_too_large"
    assert client.rig.context.responses.shelf.size_bytes == kept
    assert (await client.create([reference, reference, user("z")], says="ok"))["status"] == "completed"


async def test_a_history_that_is_too_large_is_not_read(client: Client) -> None:
    last = None
    for _ in range(8):
        last = (await client.create("x", says="y" * 3000, previous_response_id=last))["id"]
    error = await client.refused("x", 413, previous_response_id=(await grown(client, last))["id"])
    assert error["code"] == "history_too_large"


async def grown(client: Client, last: str | None) -> Any:
    return await client.create([user("x" * 40_000)], says="ok", previous_response_id=last)


async def test_what_would_push_out_all_others_is_refused() -> None:
    desk = Desk(bounds=DeskBounds(responses_bytes=80_000))
    client = Client(Rig(ScriptedEngine(say("Hello!"), max_model_len=1 << 21), responses=desk))
    first = await client.create("x")
    submits = len(client.rig.engine.submits)
    error = await client.refused("x" * 1_100_000, 413)
    assert (error["code"], error["param"]) == ("response_too_large", "store")
    assert len(client.rig.engine.submits) == submits
    assert len(desk.shelf) == 1
    assert (await client.get(f"/v1/responses/{first['id']}"))["id"] == first["id"]
    assert (await client.create("x" * 1_100_000, store=False))["status"] == "completed"


async def test_an_id_that_a_client_chose_is_found_in_its_own_chain_only(client: Client) -> None:
    item = user("SECRET") | {"id": "msg_1"}
    first = await client.create([item])
    reference = {"type": "item_reference", "id": "msg_1"}
    assert (await client.refused([reference], 404))["code"] == "item_not_found"
    await client.create([reference, user("more")], previous_response_id=first["id"])


async def test_what_cannot_fit_is_not_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def counted(context: Any, request: Any, fields: Any) -> Any:
        nonlocal tries
        tries += 1
        return await prepare(context, request, fields)

    monkeypatch.setattr(job, "prepare", counted)
    given = [{"role": "system", "content": "be"}, *(user(f"{i:05}" + "x" * 60) for i in range(2000))]
    client = Client(Rig(ScriptedEngine(say("Hello!"), max_model_len=4096)))
    made = await client.create(given, truncation="auto", max_output_tokens=8)
    assert made["status"] == "completed"
    assert tries <= 3

    fits: Any = given  # as it would be found by trying all
    while True:
        fits = job.shortened(fits)
        if (await client.rig.post("/v1/responses", {"model": "tiny", "input": fits})).status_code == 200:
            break
    first, last = (unpack_tokens(submit.tokens) for submit in client.rig.engine.submits)
    assert first == last


async def test_what_can_never_fit_is_refused_as_ever() -> None:
    client = Client(Rig(ScriptedEngine(say("Hello!"), max_model_len=4096)))
    error = await client.refused([user("x"), user("y" * 5000)], truncation="auto")
    assert error["code"] == "context_length_exceeded"
