"""What of the names that requests bring is written down: no key, no part of one, and little of anything."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agentserve.server.http.left_out import listed
from agentserve.server.tenants.audit import Entry
from agentserve.server.tenants.keyfile import KeysError
from tests.admins_rig import KEYS, TENANTS, TURN, Admins
from tests.api_rig import CHAT, Rig
from tests.tenants_rig import with_key

SECRET = "ab" * 32
MADE = f"ask_0123456789ab_{SECRET}"
SESSIONS = "/agentserve/sessions"


@pytest.fixture
def told() -> list[Entry]:
    return []


@pytest.fixture
def admins(tmp_path: Path, told: list[Entry]) -> Admins:
    return Admins(tmp_path, audit=told.append)


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/models/{MADE}",
        f"{SESSIONS}/{MADE}",
        f"{SESSIONS}/{MADE}/events",
        f"{SESSIONS}/x{MADE[:40]}",
        f"{SESSIONS}/{MADE.upper()}",
        f"{SESSIONS}/{MADE.replace('_', '%5F')}",
        f"/v1/responses/{MADE}",
        f"/v1/agents/sessions/{MADE}",
        f"{KEYS}/{MADE}",
        f"{TENANTS}/{MADE[:64]}/keys",
        f"/{MADE}",
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_key_in_a_path_is_refused_as_in_a_query(
    admins: Admins, told: list[Entry], path: str, method: str
) -> None:
    for key in (None, "wrong"):
        reply = await admins.ask(method, path, key=key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "key_in_url")
        assert SECRET[:8] not in reply.text.lower()
    assert len(told) == 2
    assert "ask_" not in repr(told).lower()


@pytest.mark.parametrize(
    "name", [SECRET, SECRET[:48], "x" * 3000, "%22" * 2600, "given-1", "%252f", "sess-1", f"%2561{MADE[1:]}"]
)
async def test_what_no_session_or_key_can_be_called_is_not_written_down(
    told: list[Entry], tmp_path: Path, name: str
) -> None:
    rig = Rig(api_keys=("given-1",), admin_keys=("boss",), audit=told.append)
    for method, path in (
        ("GET", f"{SESSIONS}/{name}"),
        ("DELETE", f"{SESSIONS}/{name}"),
        ("POST", f"{KEYS}/{name}/rotate"),
        ("DELETE", f"{KEYS}/{name}"),
        ("DELETE", f"{TENANTS}/{name}/keys"),
        ("POST", f"{TENANTS}/{name}"),
    ):
        for key in ("given-1", "boss"):
            head = with_key(key) | {"x-request-id": name if "%" not in name else "r"}
            await rig.client.request(method, path, headers=head, content=b"{}")
    assert len(told) == 12
    if name != "sess-1":
        assert all(name[:20] not in repr(entry) for entry in told)
    assert all(entry.session is None for entry in told)
    assert all(len(msgspec.json.encode(entry)) < 500 for entry in told)


async def test_lines_are_short_whatever_is_sent(told: list[Entry]) -> None:
    rig = Rig(api_keys=("one",), audit=told.append)
    head = with_key("one") | {"x-request-id": "r" * 128, "x-session-id": "s" * 128}
    for path in (f"{SESSIONS}/{'%22' * 2600}", f"{SESSIONS}/{'s' * 128}", "/" + "%01" * 2600):
        await rig.client.get(path, headers=head)
    await rig.client.post(CHAT, json=TURN, headers=head)
    assert len(told) == 4
    assert max(len(msgspec.json.encode(entry)) for entry in told) < 600


async def test_a_session_and_a_tenant_are_named(admins: Admins, told: list[Entry]) -> None:
    key = (await admins.made("acme"))["key"]
    session = f"sess-{'0f' * 12}"
    await admins.ask("GET", f"{SESSIONS}/{session}", key=key)
    assert (told[-1].session, told[-1].status) == (session, 404)
    await admins.ask("DELETE", f"{TENANTS}/acme/keys")
    assert told[-1].about == "acme"


async def test_requests_of_admins_that_fail_say_what_they_were_about(
    admins: Admins, told: list[Entry]
) -> None:
    made = await admins.made("acme")
    other = (await admins.made("other"))["key"]
    told.clear()
    for method, path, body, key, status in (
        ("DELETE", f"{KEYS}/{'0' * 12}", None, None, 404),
        ("POST", f"{KEYS}/{'1' * 12}/rotate", {}, None, 404),
        ("POST", f"{KEYS}/{made['id']}/rotate", {"grace_seconds": -1}, None, 400),
        ("POST", f"{KEYS}/{made['id']}/rotate", {"grace": 1}, None, 400),
        ("POST", f"{TENANTS}/acme", {"limits": {"sessions": 0}}, None, 400),
        ("DELETE", f"{KEYS}/{made['id']}", None, other, 403),
        ("DELETE", f"{TENANTS}/acme/keys", None, other, 403),
    ):
        reply = await admins.ask(method, path, body, key)
        assert reply.status_code == status, reply.text
    assert [entry.about for entry in told] == [
        "0" * 12,
        "1" * 12,
        made["id"],
        made["id"],
        "acme",
        made["id"],
        "acme",
    ]


async def test_no_tenant_is_called_as_a_key(admins: Admins, told: list[Entry]) -> None:
    name = MADE[:64]
    with pytest.raises(KeysError):
        admins.file.create(name, 1.0)
    reply = await admins.ask("POST", KEYS, {"tenant": name})
    assert reply.status_code == 400
    assert "ask_" not in repr(told)
    for path in ("a b", "x" * 65):
        reply = await admins.ask("DELETE", f"{TENANTS}/{path}/keys")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "tenant_not_found")
        assert told[-1].about is None


def test_what_is_left_out_of_a_request_is_told_without_keys() -> None:
    told = listed(["web_search", MADE, f"x {MADE}", f"{'y' * 30}{MADE}", "web_search"])
    assert told == "'web_search' (2), '(a key)' (3)"
