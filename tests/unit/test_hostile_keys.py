"""Keys as strangers send them: split, doubled, disagreeing, huge, in other scripts, in URLs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.config import ConfigError, load
from agentserve.server.tenants import keys as keys_module
from agentserve.server.tenants.audit import Entry
from agentserve.server.tenants.keyfile import KeyFile
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.keys import GivenKeys, KeyTable
from tests.api_rig import Rig, served
from tests.fakes import ScriptedEngine
from tests.tenants_rig import with_key

GIVEN, OTHER = "given-1", "given-2"


@pytest.fixture
def rig() -> Rig:
    return Rig(ScriptedEngine(), api_keys=(GIVEN, OTHER), admin_keys=("boss",))


async def status(rig: Rig, *headers: tuple[bytes, bytes], path: str = "/v1/models") -> tuple[int, str | None]:
    """As they came over the wire, not as a client's library would send them."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path.partition("?")[0],
        "raw_path": path.encode(),
        "query_string": path.partition("?")[2].encode("latin-1"),
        "headers": [(b"host", b"localhost"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await rig.app(scope, receive, send)
    reply = httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=sent[1]["body"])
    error = reply.json().get("error")
    return reply.status_code, None if error is None else error["code"]


AUTH, KEY = b"authorization", b"x-api-key"
GOOD = b"Bearer given-1"
NONE, SEVERAL = (401, "invalid_api_key"), (401, "several_keys")
LET_IN = (200, None)


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([(AUTH, GOOD)], LET_IN),
        ([(AUTH, b"bearer  given-1 ")], LET_IN),
        ([(KEY, b"given-1")], LET_IN),
        ([(AUTH, GOOD), (AUTH, GOOD)], LET_IN),  # a proxy that repeats it
        ([(AUTH, GOOD), (KEY, b"given-1")], LET_IN),  # SDKs that have both settings
        ([(AUTH, b"Basic dTpw"), (KEY, b"given-1")], LET_IN),  # a proxy's own
        ([(AUTH, GOOD), (AUTH, b"Bearer given-2")], SEVERAL),
        ([(AUTH, GOOD), (AUTH, b"Bearer wrong")], SEVERAL),
        ([(AUTH, b"Bearer wrong"), (AUTH, GOOD)], SEVERAL),
        ([(AUTH, GOOD), (KEY, b"given-2")], SEVERAL),
        ([(AUTH, GOOD), (KEY, b"boss")], SEVERAL),
        ([(AUTH, b"Bearer wrong"), (KEY, b"given-1")], SEVERAL),
        ([(KEY, b"given-1"), (KEY, b"given-2")], SEVERAL),
        ([(AUTH, b"Bearer given-1, Bearer given-2")], NONE),
        ([(AUTH, b"Bearer given-1\r\nx-api-key: given-1")], NONE),
        ([(AUTH, b"Bearer given-1\x00")], NONE),
        ([(AUTH, b"Bearer\tgiven-1")], NONE),
        ([(AUTH, b"given-1")], NONE),
        ([(AUTH, b"Bearer")], NONE),
        ([(AUTH, b"Bearer ")], NONE),
        ([(KEY, b"")], NONE),
        ([(KEY, b"Bearer given-1")], NONE),
        ([(KEY, b"GIVEN-1")], NONE),
        ([(KEY, "gìven-1".encode())], NONE),
        ([(KEY, b"\xff\xfe\x80")], NONE),
        ([(KEY, "given-1".encode("utf-16"))], NONE),
        ([(AUTH, b"Bearer " + b"k" * (1 << 20))], NONE),
        ([(KEY, b"given-1" + b" " * (1 << 20))], NONE),
        ([(b"api-key", b"given-1"), (b"cookie", b"key=given-1")], NONE),
    ],
)
async def test_what_is_let_in(rig: Rig, headers: list[tuple[bytes, bytes]], found: Any) -> None:
    assert await status(rig, *headers) == found
    if found is not LET_IN:  # an open route stays open
        assert (await status(rig, *headers, path="/version"))[0] == 200


MADE = "ask_" + "0" * 12 + "_" + "a" * 64


@pytest.mark.parametrize(
    "query",
    [
        "api_key=given-1",
        "API_KEY=given-1",
        "a=b&key=given-1",
        "access_token=",
        "token=x",
        "api%5Fkey=given-1",
        "authorization=Bearer%20given-1",
        f"after={MADE}",
        f"{MADE}",
        f"a={MADE.replace('_', '%5F')}",
    ],
)
@pytest.mark.parametrize("closed", [True, False])
async def test_a_key_in_a_url_is_refused_and_written_down_nowhere(
    query: str, closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    told: list[Entry] = []
    rig = Rig(ScriptedEngine(), api_keys=(GIVEN,) if closed else (), audit=told.append)
    assert await status(rig, (AUTH, GOOD), path=f"/v1/models?{query}") == (400, "key_in_url")
    reply = await rig.client.get(f"/v1/models?{query}", headers=with_key(GIVEN))
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    for text in (reply.text, repr(told), *ours):  # but not the client's own log
        assert GIVEN not in text
        assert "a" * 64 not in text
    assert await status(rig, (AUTH, GOOD), path="/v1/models?limit=3&after=now") == (200, None)


async def test_headers_are_not_split_on_the_wire(rig: Rig) -> None:
    """What a parser might take for the end of a header, and what stands behind it for another one."""

    async def said(head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*where)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + head + b"\r\n")
        reply = await reader.read()
        writer.close()
        return reply.partition(b"\r\n")[0].split()[1]

    async with served(rig.app) as url:
        port = int(url.rpartition(":")[2])
        where = ("127.0.0.1", port)
        assert await said(b"x-api-key: given-1\r\n") == b"200"
        for head in (
            b"x-other: a\nx-api-key: given-1\r\n",
            b"x-other: a\rx-api-key: given-1\r\n",
            b"x-other: a\r\n x-api-key: given-1\r\n",  # folded: it goes on
            b"x-other: a\x00\r\nx-api-key: given-1\r\n",
            b"x-api-key : given-1\r\n",
            b"x-api-key\x0b: given-1\r\n",
            b"authorization: Bearer given-1\r\n\tx\r\n",
            b"authorization: Bearer given-1\r\nauthorization: Bearer given-2\r\n",
        ):
            assert await said(head) in (b"400", b"401", b"431"), head


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many comparisons, of as many bytes, whatever is asked for and wherever it is found."""
    compared: list[tuple[int, int]] = []
    real = keys_module.hmac.compare_digest

    def counted(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", counted)
    file = KeyFile(tmp_path / "tenants")
    made = [file.create(tenant, 1.0)[1] for tenant in ("a", "b", None)]
    ring = Keyring([GIVEN, OTHER], ["boss"], file)
    seen = set()
    for key in (GIVEN, OTHER, "boss", "x", "k" * 512, *made, made[0][:-1] + "0", MADE):
        compared.clear()
        ring.caller(key)
        seen.add(tuple(compared))
    assert seen == {((32, 32),) * 4}
    assert len(GivenKeys([GIVEN], "x")) == 1
    assert KeyTable(b"").caller(MADE) is None


@pytest.mark.parametrize("key", ["schlüssel", "two words", "tab\there", "k" * 513, " edge", "\x7f"])
def test_a_key_that_no_header_brings_stops_the_start(key: str) -> None:
    for setting in ("api_key", "admin_key"):
        with pytest.raises(ConfigError, match="visible ASCII") as error:
            load({setting: (key,)})
        assert key not in str(error.value)
