"""Deny by default over the whole route table, and what a tenant's limits refuse before any work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from agentserve.metrics import Metrics
from agentserve.server.errors import json_response
from agentserve.server.http.access import RULES, Access, guard, undeclared
from agentserve.server.http.app import _routes
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.endings import OpenRequests
from agentserve.server.http.gate import Gate, Guards
from agentserve.server.tenants.accounts import Accounts
from agentserve.server.tenants.audit import Entry
from agentserve.server.tenants.keyfile import KeyFile
from agentserve.server.tenants.keyring import Keyring
from agentserve.tenant_limits import TenantLimits, TenantsConfig
from tests.api_rig import CHAT, Rig, user
from tests.fakes import ScriptedEngine, say
from tests.tenants_rig import WRONG, A, B, MadeUpKeys, Tenants, with_key

CALLBACK = "/v1/tool_callbacks/{token}"
ROUTES = [
    (method, re.sub(r"\{[^}]*\}", "x", route.path), route.path)
    for route in _routes()
    for method in sorted((route.methods or set()) - {"HEAD"})
]


def test_every_route_says_who_may_call_it() -> None:
    assert undeclared(_routes()) == []
    paths = {route.path for route in _routes()}
    assert set(RULES) == paths, "a rule for no route is a door left open for the next one"


def test_open_routes_tell_nothing_of_tenants_and_take_nothing() -> None:
    opened = {path for path, rule in RULES.items() if rule.access is Access.OPEN}
    assert opened == {"/health", "/ready", "/ping", "/version", CALLBACK}


@dataclass(frozen=True)
class Keys:
    """Real ones."""

    ring: Keyring
    tenant: str
    admin: str
    revoked: str
    old_admin: str


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "tenants")
    made = [file.create(tenant, 1.0) for tenant in ("a", None, "a", None)]
    gone = {record.id for record, _ in made[2:]}
    file.revoke(lambda record: record.id in gone, 2.0)
    return Keys(Keyring(["given"], file=file), *(key for _, key in made))


@pytest.mark.parametrize(("method", "path", "declared"), ROUTES)
async def test_every_route_without_a_key_with_a_wrong_one_a_revoked_one_and_the_wrong_kind(
    method: str, path: str, declared: str, keys: Keys
) -> None:
    rig = Rig(ScriptedEngine(), keyring=keys.ring)
    access = RULES[declared].access

    async def reply(headers: dict[str, str]) -> httpx.Response:
        told = await rig.client.request(method, path, headers=headers, content=b"{}")
        assert "x-request-id" in told.headers
        return told

    key = keys.tenant
    wrong = (
        {},
        with_key(WRONG),
        {"x-api-key": WRONG},
        {"authorization": key},
        {"authorization": f"Basic {key}"},
        with_key(f"{key}x"),
        with_key(key[:-1]),
        with_key(keys.revoked),
        with_key(keys.old_admin),
        with_key(WRONG) | {"x-api-key": key},
        with_key(key) | {"x-api-key": keys.admin},
    )
    told = [await reply(headers) for headers in wrong]
    if declared == CALLBACK:  # the token is the key, and this is none
        assert {one.status_code for one in told} == {404}
        return
    if access is Access.OPEN:
        assert all(one.status_code < 400 for one in told)
        return
    assert {one.status_code for one in told} == {401}
    assert {one.headers["www-authenticate"] for one in told} == {"Bearer"}
    # A key that was revoked is told what one that never was is told.
    said = {re.sub(r"req-[0-9a-f]+", "", one.text) for one in told[:-2]}
    assert len(said) == 1
    anthropic = path.startswith("/v1/messages")
    assert told[0].json().get("type") == ("error" if anthropic else None)
    assert told[0].json()["error"]["type"] == "authentication_error"

    admin, tenant = await reply(with_key(keys.admin)), await reply(with_key(key))
    if access is Access.TENANT:
        assert (admin.status_code, "admin" in admin.text) == (403, True)
        assert tenant.status_code not in (401, 403)
    else:
        assert admin.status_code not in (401, 403)
        assert (tenant.status_code, tenant.json()["error"]["code"]) == (403, "admin_key_needed")
    assert not rig.engine.submits


@pytest.mark.parametrize(
    "path", ["/x", "/health/", "/Health", "//health", "/v1/../metrics", "/health/../metrics"]
)
async def test_what_is_no_route_is_refused_alike(path: str) -> None:
    rig = Tenants(ScriptedEngine())
    for headers in ({}, with_key(WRONG)):
        reply = await rig.client.get(path, headers=headers)
        assert reply.status_code == 401
    assert (await rig.a.get(path)).status_code in (404, 403, 307)


async def test_a_route_that_nobody_declared_is_refused() -> None:
    async def endpoint(request: Request) -> Response:
        return json_response({"tenant": tenant_of(request)})

    routes = [Route("/new", endpoint), Route("/known", endpoint)]
    accounts = Accounts(TenantsConfig(), lambda: 0.0)
    rules = {"/known": RULES["/v1/models"]}
    guard(routes, accounts, rules)
    rig = Tenants(ScriptedEngine())
    app = Starlette(routes=routes, exception_handlers=rig.app.exception_handlers)
    nothing: frozenset[str] = frozenset()
    guards = Guards(MadeUpKeys(), accounts, nothing, nothing, lambda: 0.0, lambda: 0.0, OpenRequests())  # type: ignore[arg-type]
    app.add_middleware(Gate, options=rig.context.options, metrics=rig.context.metrics, guards=guards)
    rig.a._transport.app = app  # type: ignore[attr-defined]
    assert (await rig.a.get("/known")).json() == {"tenant": "a"}
    refused = await rig.a.get("/new")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "access_not_declared")
    with pytest.raises(TypeError, match="plain routes"):
        guard([Mount("/all", app)], accounts, rules)


async def test_nothing_but_http_is_served() -> None:
    rig = Tenants(ScriptedEngine())
    with pytest.raises(RuntimeError, match="not served"):
        await rig.app({"type": "websocket", "path": "/v1/models", "headers": []}, None, None)  # type: ignore[arg-type]


async def test_a_key_given_at_the_start_does_all_while_there_is_no_other() -> None:
    alone = Rig(api_keys=("one",))
    beside = Rig(api_keys=("one",), admin_keys=("boss",))
    key, boss = {"x-api-key": "one"}, {"x-api-key": "boss"}
    for path in ("/metrics", "/v1/models"):
        assert (await alone.client.get(path, headers=key)).status_code == 200
    assert (await beside.client.get("/v1/models", headers=key)).status_code == 200
    assert (await beside.client.get("/metrics", headers=key)).status_code == 403
    assert (await beside.client.get("/metrics", headers=boss)).status_code == 200
    assert (await beside.client.get("/v1/models", headers=boss)).status_code == 403


# --- limits ------------------------------------------------------------------------------


def limited(named: dict[str, TenantLimits] | None = None, audit: Any = None, **limits: int) -> Tenants:
    config = TenantsConfig(TenantLimits(**limits), named or {})
    return Tenants(ScriptedEngine(say("hello")), tenants=config, audit=audit)


def body(text: str = "hi") -> dict[str, Any]:
    return {"model": "tiny", "messages": [user(text)], "max_tokens": 50}


async def test_a_rate_of_requests_in_both_dialects() -> None:
    rig = limited(requests_per_minute=2)
    first = await rig.a.get("/v1/models")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    await rig.a.post(CHAT, json=body())
    refused = await rig.a.post(CHAT, json=body())
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-should-retry"] == "true"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    other = await rig.a.post("/v1/messages", json=body())
    assert (other.status_code, other.json()["type"]) == (429, "error")
    assert other.json()["error"]["type"] == "rate_limit_error"
    assert other.headers["anthropic-ratelimit-requests-limit"] == "2"
    assert other.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert (await rig.b.post(CHAT, json=body())).status_code == 200
    assert (await rig.a.get("/health")).status_code == 200  # nobody's rate
    assert len(rig.engine.submits) == 2


async def test_limits_are_a_tenant_s_whatever_key_it_comes_with_and_of_one_by_its_name() -> None:
    rig = limited({"b": TenantLimits()}, requests_per_minute=1)
    assert (await rig.a.get("/v1/models")).status_code == 200
    assert (await rig.a.get("/v1/models")).status_code == 429
    for _ in range(3):
        reply = await rig.b.get("/v1/models")
        assert reply.status_code == 200
        assert "x-ratelimit-limit-requests" not in reply.headers
        assert (await rig.admin.get("/metrics")).status_code == 200


async def test_what_a_request_says_of_its_tenant_counts_for_nothing() -> None:
    rig = limited()
    for headers in ({"x-tenant": "b"}, {"x-tenant-id": "b"}, {"openai-organization": "b"}):
        await rig.a.post(CHAT, json=body() | {"tenant": "b", "user": "b"}, headers=headers)
    assert {submit.namespace for submit in rig.engine.submits} == {"1:a:"}


async def test_the_audit_log_says_who_did_what_and_no_word_of_it() -> None:
    told: list[Entry] = []
    rig = limited(audit=told.append)
    reply = await rig.a.post(CHAT, json=body("a secret sentence"), headers={"x-request-id": "mine"})
    await rig.client.get("/metrics", headers=with_key("a-wrong-key"))
    await rig.a.get("/agentserve/sessions/some-name/")
    await rig.nobody.get("/health")
    await rig.a.get("/v1/models/tiny")
    await rig.b.get(f"/agentserve/sessions/{reply.headers['x-session-id']}")
    done, refused, nothing, model, foreign = told
    assert (model.route, model.session) == ("/v1/models/{name:path}", None)
    assert foreign.session == done.session
    assert (done.tenant, done.key, done.method, done.status) == ("a", "id-a", "POST", 200)
    assert (done.route, done.request) == (CHAT, "mine")
    assert done.session == reply.headers["x-session-id"]
    assert (refused.tenant, refused.key, refused.status, refused.route) == (None, None, 401, None)
    assert nothing.route is None
    assert (foreign.tenant, foreign.status, foreign.route) == ("b", 404, "/agentserve/sessions/{name}")
    assert not re.search(f"secret|{A}|{B}|wrong-key|hello", repr(told))


async def test_metrics_tell_the_admin_what_each_tenant_did() -> None:
    rig = limited({"a": TenantLimits(concurrent_turns=1)})
    for _ in range(2):
        await rig.a.post(CHAT, json=body())
    await rig.a.post(CHAT, json=body() | {"n": 2})
    await rig.b.get("/v1/models")
    page = (await rig.admin.get("/metrics")).text
    found = dict(re.findall(r'^agentserve_tenant_(\w+_total\{tenant="\w+"\}) (\S+)', page, re.MULTILINE))
    prompt = len(rig.engine.submits[0].tokens) // 4
    assert {name: float(value) for name, value in found.items() if '"a"' in name} == {
        'requests_total{tenant="a"}': 3,
        'refused_total{tenant="a"}': 1,
        'turns_total{tenant="a"}': 2,
        'prompt_tokens_total{tenant="a"}': 2 * prompt,
        'generated_tokens_total{tenant="a"}': 12,
        'cached_tokens_total{tenant="a"}': prompt - 1,
        'preemptions_total{tenant="a"}': 0,
    }
    assert found['requests_total{tenant="b"}'] == "1.0"


def test_names_of_tenants_in_metrics_are_bounded() -> None:
    metrics = Metrics()
    metrics.tenants.set({f"t{i}": (1, 0, 0, 0, 0) for i in range(500)})
    lines = [line for line in metrics.render().decode().splitlines() if "tenant_requests_total{" in line]
    assert len(lines) == 101
    assert lines[-1].endswith('{tenant="(others)"} 400.0')
