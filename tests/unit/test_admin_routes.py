"""Keys and limits over HTTP, with an admin's key; and what a revoked key still has: nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.server.tenants.audit import Entry
from agentserve.server.tenants.keyfile import KeyFile, KeysError
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.terms import Terms
from agentserve.tenant_limits import TenantLimits, TenantsConfig
from tests.api_rig import CHAT, Rig, settled, user
from tests.fakes import ScriptedEngine, say
from tests.tenants_rig import with_key

KEYS, TENANTS = "/agentserve/admin/keys", "/agentserve/admin/tenants"
TURN = {"model": "tiny", "messages": [user("hi")], "max_tokens": 50}
CONFIG = TenantsConfig(TenantLimits(requests_per_minute=1000), {"loud": TenantLimits(sessions=7)})


class Admins(Rig):
    def __init__(self, folder: Path, engine: ScriptedEngine | None = None, **more: Any) -> None:
        self.file = KeyFile(folder / "tenants")
        self.time = 1000.0
        _, self.boss = self.file.create(None, 1.0)
        super().__init__(
            engine or ScriptedEngine(say("hello")),
            keyring=Keyring(file=self.file, wall=lambda: self.time),
            terms=Terms(CONFIG, self.file.folder),
            wall=lambda: self.time,
            tenants=CONFIG,
            **more,
        )

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        content = None if body is None else json.dumps(body).encode()
        return await self.client.request(method, path, content=content, headers=with_key(key or self.boss))

    async def made(self, tenant: str) -> dict[str, Any]:
        reply = await self.ask("POST", KEYS, {"tenant": tenant})
        assert reply.status_code == 200, reply.text
        assert reply.headers["cache-control"] == "no-store"
        told: dict[str, Any] = reply.json()
        return told

    async def models(self, key: str) -> int:
        return (await self.client.get("/v1/models", headers=with_key(key))).status_code


@pytest.fixture
def admins(tmp_path: Path) -> Admins:
    return Admins(tmp_path)


async def test_a_key_is_shown_once_and_works_at_once(admins: Admins) -> None:
    made = await admins.made("acme")
    key = made.pop("key")
    assert made == {
        "object": "key",
        "id": made["id"],
        "tenant": "acme",
        "admin": False,
        "created": 1000.0,
        "status": "active",
        "revoked_at": None,
    }
    assert await admins.models(key) == 200
    listed = await admins.ask("GET", KEYS)
    assert key.rpartition("_")[2] not in listed.text
    assert [one["tenant"] for one in listed.json()["data"]] == [None, "acme"]
    assert [one["id"] for one in (await admins.ask("GET", f"{KEYS}?tenant=acme")).json()["data"]] == [
        made["id"]
    ]
    assert [record.id for record in admins.file.records()][1] == made["id"]  # as the command line has it


async def test_a_revoked_key_is_let_in_no_longer_and_others_are(admins: Admins) -> None:
    one, two = await admins.made("acme"), await admins.made("acme")
    gone = await admins.ask("DELETE", f"{KEYS}/{one['id']}")
    assert (gone.json()["status"], gone.json()["revoked_at"]) == ("revoked", 1000.0)
    assert (await admins.models(one["key"]), await admins.models(two["key"])) == (401, 200)
    for id_ in (one["id"], "nobody"):
        again = await admins.ask("DELETE", f"{KEYS}/{id_}")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "key_not_found")
    rest = await admins.ask("DELETE", f"{TENANTS}/acme/keys")
    assert [key["id"] for key in rest.json()["data"]] == [two["id"]]
    assert await admins.models(two["key"]) == 401


async def test_a_key_that_is_rotated_holds_for_its_grace(admins: Admins) -> None:
    old = await admins.made("acme")
    new = (await admins.ask("POST", f"{KEYS}/{old['id']}/rotate", {"grace_seconds": 60})).json()
    assert (new["tenant"], new["status"]) == ("acme", "active")
    assert (await admins.models(old["key"]), await admins.models(new["key"])) == (200, 200)
    listed = (await admins.ask("GET", f"{KEYS}?tenant=acme")).json()["data"]
    assert [(key["status"], key["revoked_at"]) for key in listed] == [("expiring", 1060.0), ("active", None)]
    admins.time = 1060.0
    assert (await admins.models(old["key"]), await admins.models(new["key"])) == (401, 200)
    assert (await admins.ask("POST", f"{KEYS}/{old['id']}/rotate", {})).status_code == 404
    newer = (await admins.ask("POST", f"{KEYS}/{new['id']}/rotate")).json()  # at once, without a body
    assert (await admins.models(new["key"]), await admins.models(newer["key"])) == (401, 200)
    boss = (await admins.ask("GET", KEYS)).json()["data"][0]["id"]
    other = (await admins.ask("POST", f"{KEYS}/{boss}/rotate", {})).json()
    assert (other["admin"], other["tenant"]) == (True, None)
    assert (await admins.ask("GET", KEYS)).status_code == 401  # it was its own
    assert (await admins.ask("GET", KEYS, key=other["key"])).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", KEYS, {}, 400),
        ("POST", KEYS, {"tenant": "a", "admin": True}, 400),
        ("POST", KEYS, {"tenant": "a b"}, 400),
        ("POST", KEYS, {"tenant": ""}, 400),
        ("POST", KEYS, {"tenant": "x" * 65}, 400),
        ("POST", KEYS, {"tenent": "a"}, 400),
        ("POST", KEYS, [], 400),
        ("POST", f"{KEYS}/x/rotate", {"grace_seconds": -1}, 400),
        ("POST", f"{KEYS}/x/rotate", {"grace_seconds": 1e9}, 400),
        ("POST", f"{TENANTS}/a", {"limits": {"requests": 1}}, 400),
        ("POST", f"{TENANTS}/a", {"limits": {"sessions": 0}}, 400),
        ("POST", f"{TENANTS}/a", {"limits": {"sessions": "many"}}, 400),
        ("POST", f"{TENANTS}/a", {}, 400),
        ("POST", f"{TENANTS}/a%20b", {"limits": {}}, 404),
        ("GET", f"{TENANTS}/..", None, 404),
    ],
)
async def test_what_cannot_be_meant_changes_nothing(
    admins: Admins, method: str, path: str, body: Any, status: int
) -> None:
    reply = await admins.ask(method, path, body)
    assert reply.status_code == status, reply.text
    assert len(admins.file.records()) == 1
    assert admins.context.terms.said("a") == {}


async def test_limits_are_set_at_once_kept_and_taken_back(admins: Admins, tmp_path: Path) -> None:
    key = (await admins.made("acme"))["key"]
    told = await admins.ask("POST", f"{TENANTS}/acme", {"limits": {"requests_per_minute": 2}})
    assert told.json()["limits"]["requests_per_minute"] == 2
    assert told.json()["set"] == {"requests_per_minute": 2}
    assert [await admins.models(key) for _ in range(3)] == [200, 200, 429]
    await admins.ask("POST", f"{TENANTS}/acme", {"limits": {"requests_per_minute": "none", "sessions": 3}})
    assert await admins.models(key) == 200
    for number in range(5):
        turn = TURN | {"messages": [user(str(number))]}
        assert (await admins.client.post(CHAT, json=turn, headers=with_key(key))).status_code == 200
    shown = (await admins.ask("GET", f"{TENANTS}/acme")).json()
    assert (shown["keys"], shown["sessions"], shown["limits"]["sessions"]) == (1, 3, 3)
    again = Terms(CONFIG, tmp_path / "tenants")  # the next server
    assert (again.of("acme").requests_per_minute, again.of("acme").sessions) == (None, 3)
    assert again.of("other").requests_per_minute == 1000
    back = {"limits": {"requests_per_minute": None, "sessions": None}}
    shown = (await admins.ask("POST", f"{TENANTS}/acme", back)).json()
    assert (shown["set"], shown["limits"]["requests_per_minute"]) == ({}, 1000)


async def test_what_was_owed_stays_owed_when_a_limit_changes(admins: Admins) -> None:
    accounts = admins.context.accounts
    await admins.ask("POST", f"{TENANTS}/acme", {"limits": {"tokens_per_minute": 100}})
    accounts.spent("acme", 400, 0)
    await admins.ask("POST", f"{TENANTS}/acme", {"limits": {"tokens_per_minute": 200}})
    [_, tokens] = accounts.standings("acme")
    assert (tokens.limit, tokens.remaining) == (200, 0)
    assert tokens.reset > 60


async def test_tenants_are_listed(admins: Admins) -> None:
    await admins.made("acme")
    listed = (await admins.ask("GET", TENANTS)).json()["data"]
    assert [(one["id"], one["keys"]) for one in listed] == [("acme", 1), ("default", 0), ("loud", 0)]
    assert listed[2]["limits"]["sessions"] == 7


async def test_without_a_data_directory_there_is_nothing_to_keep_them_in() -> None:
    rig = Rig(admin_keys=("boss",), api_keys=("one",))
    boss = {"x-api-key": "boss"}
    for method, path, body in (
        ("GET", KEYS, b""),
        ("POST", KEYS, b'{"tenant":"a"}'),
        ("DELETE", f"{KEYS}/x", b""),
    ):
        reply = await rig.client.request(method, path, content=body, headers=boss)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "no_data_dir")
    reply = await rig.client.post(f"{TENANTS}/a", json={"limits": {"sessions": 1}}, headers=boss)
    assert reply.status_code == 400
    assert (await rig.client.get(TENANTS, headers=boss)).json()["data"][0]["id"] == "default"


def test_a_file_of_limits_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    for content in ("nonsense", '{"version": 2, "tenants": {}}', '{"version":1,"tenants":{"a":{"x":1}}}'):
        path.write_text(content)
        with pytest.raises(KeysError):
            Terms(CONFIG, tmp_path)


async def test_the_audit_log_says_which_key_or_tenant_it_was_about(tmp_path: Path) -> None:
    told: list[Entry] = []
    rig = Admins(tmp_path, audit=told.append)
    made = await rig.made("acme")
    await rig.ask("POST", f"{TENANTS}/acme", {"limits": {"sessions": 3}})
    await rig.ask("DELETE", f"{KEYS}/{made['id']}")
    assert [entry.about for entry in told] == [made["id"], "acme", made["id"]]
    assert [entry.route for entry in told] == [KEYS, f"{TENANTS}/{{tenant}}", f"{KEYS}/{{id}}"]
    assert made["key"].rpartition("_")[2] not in repr(told)


# --- what runs for a key that is revoked ---------------------------------------------------


async def until_open(rig: Rig, number: int) -> None:
    await settled(lambda: len(rig.context.open_requests) == number)


async def test_a_stream_ends_with_its_key_and_its_turn_is_taken_back(tmp_path: Path) -> None:
    script = say("hello", hold_at=2)
    rig = Admins(tmp_path, ScriptedEngine(script))
    mine, other = await rig.made("acme"), await rig.made("acme")
    turn = TURN | {"stream": True}
    streams = [
        asyncio.create_task(rig.client.post(CHAT, json=turn, headers=with_key(one["key"])))
        for one in (mine, other)
    ]
    await settled(lambda: len(rig.engine.submits) == 2)
    await rig.ask("DELETE", f"{KEYS}/{mine['id']}")
    cut = await streams[0]
    last = [line for line in cut.text.splitlines() if line.startswith("data: ")][-1]
    assert json.loads(last[6:])["error"]["code"] == "key_revoked"
    script.release.set()
    assert (await streams[1]).text.rstrip().endswith("[DONE]")
    sessions = rig.context.directory.sessions("acme")
    assert [session.committed for session in sessions] == [1]  # the other's
    assert not rig.engine.live
    assert len(rig.context.open_requests) == 0


async def test_a_whole_answer_is_a_401_in_the_dialect_that_was_spoken(tmp_path: Path) -> None:
    rig = Admins(tmp_path, ScriptedEngine(say("hello", hold_at=1)))
    made = await rig.made("acme")
    asked = [
        asyncio.create_task(rig.client.post(path, json=TURN, headers=with_key(made["key"])))
        for path in (CHAT, "/v1/messages")
    ]
    await settled(lambda: len(rig.engine.submits) == 2)
    rig.file.revoke(lambda record: record.tenant == "acme", 1000.0)  # by the command line
    rig.context.look_at_keys()
    openai, anthropic = await asyncio.gather(*asked)
    assert (openai.status_code, openai.json()["error"]["code"]) == (401, "key_revoked")
    assert (anthropic.status_code, anthropic.json()["type"]) == (401, "error")
    assert anthropic.json()["error"]["type"] == "authentication_error"
    assert not rig.engine.live


async def test_readers_of_events_are_cut_off_and_what_is_the_tenant_s_goes_on(tmp_path: Path) -> None:
    script = say("hello", hold_at=1)
    rig = Admins(tmp_path, ScriptedEngine(script))
    one, two = await rig.made("acme"), await rig.made("acme")
    head = with_key(one["key"])
    behind = {"model": "tiny", "input": "hi", "background": True}
    response = (await rig.client.post("/v1/responses", json=behind, headers=head)).json()
    agent = {"agent": {"model": "tiny"}, "environment": {"type": "none"}, "input": "hi"}
    working = (await rig.client.post("/v1/agents/sessions", json=agent, headers=head)).json()
    await settled(lambda: len(rig.engine.submits) == 2)
    paths = (
        f"/v1/agents/sessions/{working['id']}/events",
        f"/v1/responses/{response['id']}?stream=true",
        f"/agentserve/sessions/{working['id']}/events",
    )
    readers = [asyncio.create_task(rig.client.get(path, headers=head)) for path in paths]
    await until_open(rig, 3)
    rig.file.rotate(one["id"], 1000.0, 5.0)
    rig.context.look_at_keys()
    await asyncio.sleep(0)
    assert len(rig.context.open_requests) == 3  # until its grace is over
    rig.time = 1005.0
    rig.context.look_at_keys()
    for reader in readers:
        assert "key_revoked" in (await reader).text
    script.release.set()
    mine = with_key(two["key"])
    await settled(lambda: rig.context.responses.live(response["id"]).over)
    told = (await rig.client.get(f"/v1/responses/{response['id']}", headers=mine)).json()
    assert told["status"] == "completed"
    await settled(lambda: rig.context.agents.shelf.get("acme", working["id"]).status == "idle")
