"""Keys and limits over HTTP, with an admin's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentserve.server.tenants.audit import Entry
from agentserve.server.tenants.keyfile import KeyFile, KeysError
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.terms import Terms
from tests.admins_rig import CONFIG, KEYS, TENANTS, TURN, Admins
from tests.api_rig import CHAT, Rig, user
from tests.tenants_rig import with_key


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


async def test_an_open_server_has_no_admin(tmp_path: Path) -> None:
    """Whoever is on this machine may use it, but not close it to all others by making its first key."""
    rig = Rig(keyring=Keyring(file=KeyFile(tmp_path)), terms=Terms(CONFIG, tmp_path))
    for method, path in (("POST", KEYS), ("GET", KEYS), ("POST", f"{TENANTS}/a"), ("GET", TENANTS)):
        reply = await rig.client.request(method, path, content=b'{"tenant":"a"}')
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_key_needed")
    assert not rig.context.keyring.closed
    assert (await rig.client.get("/metrics")).status_code == 200


async def test_keys_of_the_start_make_an_admins_key_first(tmp_path: Path) -> None:
    """They open admin routes only until there is a key: made for a tenant, it left nobody to make another."""
    file = KeyFile(tmp_path)
    rig = Rig(keyring=Keyring(("given",), file=file), terms=Terms(CONFIG, tmp_path))
    given = {"x-api-key": "given"}
    early = await rig.client.post(KEYS, json={"tenant": "acme"}, headers=given)
    assert (early.status_code, early.json()["error"]["code"]) == (409, "admin_key_first")
    assert not file.records()
    assert (await rig.client.get(TENANTS, headers=given)).status_code == 200
    made = await rig.client.post(KEYS, json={"admin": True}, headers=given)
    assert made.status_code == 200
    assert (await rig.client.get(TENANTS, headers=given)).status_code == 403
    assert (await rig.client.get("/v1/models", headers=given)).status_code == 200
    boss = {"x-api-key": made.json()["key"]}
    assert (await rig.client.post(KEYS, json={"tenant": "acme"}, headers=boss)).status_code == 200


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
