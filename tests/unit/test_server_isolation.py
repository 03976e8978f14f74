"""What tenant B sees of tenant A: nothing. Not by any id on any route, nor by names, histories, calls,
counts, errors, or what the cache has. Of A's things B is told what it is told of things that never were."""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from agentserve.core.namespaces import Namespaces
from agentserve.messages import Submit, pack_tokens
from agentserve.server.http.access import RULES, Access
from agentserve.server.http.app import _routes
from agentserve.server.http.turn_parts import namespace
from agentserve.tenant_limits import TenantLimits, TenantsConfig
from agentserve.types import Sampling, SessionId, TurnId
from tests.api_rig import CHAT, TOOLS, hermes, settled, user
from tests.engines import Rig as CoreRig
from tests.fakes import ScriptedEngine, say
from tests.tenants_rig import Tenants
from tiering.keys import block_key

PROMPT = "The code of the vault is 4711, and nobody may know it but Ann."
CALLING = hermes("now", "{}")
AGENTS = "/v1/agents/sessions"
AGENT = {"model": "tiny", "instructions": PROMPT}
NOWHERE = {"environment": {"type": "none"}}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": list(messages) or [user(PROMPT)], **fields}


async def ok(reply: httpx.Response) -> Any:
    assert reply.status_code in (200, 201), reply.text
    return reply.json()


@dataclass
class Things:
    """One of each thing that has an id, all of tenant A."""

    session: str
    call: str
    response: str
    background: str
    item: str
    conversation: str
    entry: str
    message: str
    agent: str
    working: str  # an agent's session
    turn: str
    hook: str

    def ids(self) -> dict[str, str]:
        return dict(vars(self))


async def things(rig: Tenants) -> Things:
    a = rig.a
    rig.engine.reply = say(CALLING)
    chat = await ok(await a.post(CHAT, json=body(tools=TOOLS)))
    rig.engine.reply = say("hello")
    made = await ok(await a.post("/v1/responses", json={"model": "tiny", "input": PROMPT}))
    behind = {"model": "tiny", "input": PROMPT, "background": True}
    background = await ok(await a.post("/v1/responses", json=behind))
    await settled(lambda: rig.context.responses.shelf.get(background["id"]).shown()["status"] == "completed")
    first = {"type": "message", "role": "user", "content": PROMPT}
    talk = await ok(await a.post("/v1/conversations", json={"items": [first]}))
    entries = await ok(await a.get(f"/v1/conversations/{talk['id']}/items"))
    asked = body(max_tokens=9, thread={"type": "create"})
    message = await ok(await a.post("/v1/messages", json=asked))
    saved = await ok(await a.post("/v1/agents", json=AGENT))
    working = await ok(await a.post(AGENTS, json={"agent": AGENT, "input": PROMPT, **NOWHERE}))
    await settled(lambda: rig.context.agents.shelf.get("a", working["id"]).status == "idle")
    turns = await ok(await a.get(f"{AGENTS}/{working['id']}/turns"))
    asked_for = {"name": "h", "url": "https://a.example/h", "event_types": ["response.completed"]}
    hook = await ok(await a.post(HOOKS, json=asked_for))
    return Things(
        session=chat["session_id"],
        call=chat["choices"][0]["message"]["tool_calls"][0]["id"],
        response=made["id"],
        background=background["id"],
        item=made["output"][0]["id"],
        conversation=talk["id"],
        entry=entries["data"][0]["id"],
        message=message["id"],
        agent=saved["id"],
        working=working["id"],
        turn=turns["data"][0]["id"],
        hook=hook["id"],
    )


def unknown(id_: str) -> str:
    """An id of the same kind that nobody has."""
    return re.sub(r"[0-9a-f]{6}$", "000000", id_)


HOOKS = "/v1/webhook_endpoints"
BY_HOOK = {"type": "webhook", "name": "f", "webhook": "{hook}"}
RESULT = {"call_id": "{call}", "content": "noon", "epoch": 0}
TRIES: list[tuple[str, str, Any]] = [
    ("GET", "/agentserve/sessions/{session}", None),
    ("DELETE", "/agentserve/sessions/{session}", None),
    ("POST", "/close_session", {"session_id": "{session}"}),
    ("POST", "/agentserve/sessions/{session}/tool_results", RESULT),
    ("POST", "/agentserve/sessions/{session}/tool_results", RESULT | {"continue": True}),
    ("POST", "/agentserve/sessions/{session}/tool_results/{call}/stream", "noon"),
    ("POST", "/agentserve/sessions/{session}/fork", {}),
    ("POST", "/agentserve/sessions/{session}/fork", {"at_turn": 1}),
    ("POST", "/agentserve/sessions/{session}/hints", {"final": True}),
    ("GET", "/agentserve/sessions/{session}/events", None),
    ("GET", "/agentserve/sessions/{session}/events?after=now", None),
    ("GET", "/v1/responses/{response}", None),
    ("GET", "/v1/responses/{response}?stream=true", None),
    ("GET", "/v1/responses/{background}?stream=true&starting_after=1", None),
    ("DELETE", "/v1/responses/{response}", None),
    ("POST", "/v1/responses/{background}/cancel", {}),
    ("GET", "/v1/responses/{response}/input_items", None),
    ("POST", "/v1/responses", {"model": "tiny", "input": "x", "previous_response_id": "{response}"}),
    ("POST", "/v1/responses/input_tokens", {"input": "x", "previous_response_id": "{response}"}),
    ("POST", "/v1/responses", {"model": "tiny", "input": "x", "conversation": "{conversation}"}),
    ("POST", "/v1/responses/input_tokens", {"input": "x", "conversation": {"id": "{conversation}"}}),
    ("POST", "/v1/responses", {"model": "tiny", "input": [{"type": "item_reference", "id": "{item}"}]}),
    ("GET", "/v1/conversations/{conversation}", None),
    ("POST", "/v1/conversations/{conversation}", {"metadata": {"a": "b"}}),
    ("DELETE", "/v1/conversations/{conversation}", None),
    ("GET", "/v1/conversations/{conversation}/items", None),
    ("POST", "/v1/conversations/{conversation}/items", {"items": [{"role": "user", "content": "x"}]}),
    ("GET", "/v1/conversations/{conversation}/items/{entry}", None),
    ("DELETE", "/v1/conversations/{conversation}/items/{entry}", None),
    (
        "POST",
        "/v1/messages",
        body(user("x"), max_tokens=9, thread={"type": "continue", "previous_message_id": "{message}"}),
    ),
    (
        "POST",
        "/v1/messages/count_tokens",
        body(user("x"), thread={"type": "continue", "previous_message_id": "{message}"}),
    ),
    ("GET", "/v1/agents/{agent}", None),
    ("POST", "/v1/agents/{agent}", AGENT),
    ("POST", AGENTS, {"agent_id": "{agent}", **NOWHERE}),
    ("GET", AGENTS + "/{working}", None),
    ("POST", AGENTS + "/{working}", {"metadata": {"a": "b"}}),
    ("GET", AGENTS + "/{working}/items", None),
    ("GET", AGENTS + "/{working}/turns", None),
    ("GET", AGENTS + "/{working}/turns/{turn}", None),
    ("GET", AGENTS + "/{working}/turns/{turn}/items", None),
    ("POST", AGENTS + "/{working}/events", {"events": [{"type": "agent.session.input.cancel"}]}),
    ("GET", AGENTS + "/{working}/events", None),
    ("DELETE", AGENTS + "/{working}", None),
    ("DELETE", "/v1/agents/{agent}", None),
    ("GET", HOOKS + "/{hook}", None),
    ("POST", HOOKS + "/{hook}", {"name": "x"}),
    ("POST", HOOKS + "/{hook}/rotate_secret", {}),
    ("POST", HOOKS + "/{hook}/test", {"event_type": "response.completed"}),
    ("POST", HOOKS + "/{hook}/disable", {}),
    ("POST", HOOKS + "/{hook}/enable", {}),
    ("GET", HOOKS + "/{hook}/deliveries", None),
    ("GET", HOOKS + "/{hook}/deliveries/evt_x", None),
    ("POST", HOOKS + "/{hook}/deliveries/evt_x/replay", {}),
    ("POST", AGENTS, {"agent": {"model": "tiny", "tools": [BY_HOOK]}, "input": "x", **NOWHERE}),
    ("DELETE", HOOKS + "/{hook}", None),
]


def filled(given: Any, ids: dict[str, str]) -> Any:
    text = json.dumps(given)
    for name, id_ in ids.items():
        text = text.replace("{" + name + "}", id_)
    return json.loads(text)


async def told(client: httpx.AsyncClient, attempt: tuple[str, str, Any], ids: dict[str, str]) -> Any:
    """Status, headers that say something, and body, each id by its kind's name."""
    method, path, given = attempt
    content = given.encode() if isinstance(given, str) else json.dumps(filled(given, ids)).encode()
    headers = {} if given is None else {"content-type": "application/json"}
    reply = await client.request(
        method, filled(path, ids), content=None if given is None else content, headers=headers
    )
    text = reply.text
    for name, id_ in ids.items():
        text = text.replace(id_, "{" + name + "}")
    text = re.sub(r"req-[0-9a-f]+", "req-", text)
    others = ("x-request-id", "request-id", "content-length")
    kept = {name: value for name, value in reply.headers.items() if name not in others}
    return reply.status_code, kept, text


def test_every_route_with_an_id_is_tried() -> None:
    tried = {path.partition("?")[0].replace("{session}", "{name}") for _, path, _ in TRIES}
    tried = {path.replace("{call}", "{call_id}") for path in tried}
    tried = {re.sub(r"\{(response|background|conversation|working)\}", "{id}", path) for path in tried}
    tried = {path.replace("{entry}", "{item}").replace("{hook}", "{id}") for path in tried}
    tried = {path.replace("evt_x", "{event}") for path in tried}
    with_ids = {
        route.path
        for route in _routes()
        if "{" in route.path and RULES[route.path].access is Access.TENANT and "models" not in route.path
    }
    assert with_ids <= tried


async def test_ids_of_another_tenant_are_as_unknown_as_those_that_never_were() -> None:
    rig = Tenants(ScriptedEngine())
    mine = await things(rig)
    real, made_up = mine.ids(), {name: unknown(id_) for name, id_ in mine.ids().items()}
    reads = [attempt for attempt in TRIES if attempt[0] == "GET" and "events" not in attempt[1]]
    before = [await told(rig.a, attempt, real) for attempt in reads]
    submits = len(rig.engine.submits)
    for attempt in TRIES:
        found = await told(rig.b, attempt, real)
        assert found == await told(rig.b, attempt, made_up), attempt
        assert found[0] == (200 if attempt[1] == "/close_session" else 404), attempt
        assert PROMPT not in found[2]
    assert len(rig.engine.submits) == submits
    assert [await told(rig.a, attempt, real) for attempt in reads] == before  # and nothing of A's has changed


async def test_its_owner_may_do_all_of_it() -> None:
    """The control: what B was refused is there, and works."""
    rig = Tenants(ScriptedEngine(say("hello")))
    for attempt in TRIES:
        real = (await things(rig)).ids()
        rig.engine.reply = say("fine")
        if "events" in attempt[1] or "evt_x" in attempt[1] or attempt[1].endswith("/test"):
            continue  # has no end, is not there, would go out
        status, _, text = await told(rig.a, attempt, real)
        assert status in (200, 201, 202), (attempt, text)


async def test_names_are_each_tenant_s_own() -> None:
    rig = Tenants(ScriptedEngine(say("hello")))
    for client in (rig.a, rig.b):
        for _ in range(2):
            reply = await ok(await client.post(CHAT, json=body(user("hi"), session_id="same")))
            assert reply["session_id"] == "same" or reply["session_id"].startswith("sess-")
    of_a, of_b = rig.context.directory.get("a", "same"), rig.context.directory.get("b", "same")
    assert of_a is not None
    assert of_b is not None
    assert of_a.key != of_b.key
    assert {submit.namespace for submit in rig.engine.submits} == {"1:a:", "1:b:"}
    child = body(user("x"), session_id="kid")
    await ok(await rig.b.post(CHAT, json=child, headers={"x-parent-session-id": str(of_a.key)}))
    assert (await ok(await rig.b.get("/agentserve/sessions/kid")))["parent"] is None


async def test_histories_and_calls_of_another_lead_nowhere() -> None:
    rig = Tenants(ScriptedEngine(say(CALLING)))
    first = await ok(await rig.a.post(CHAT, json=body(tools=TOOLS)))
    history = [user(PROMPT), first["choices"][0]["message"]]
    call = history[1]["tool_calls"][0]["id"]
    rig.engine.reply = say("noon")
    result = {"role": "tool", "tool_call_id": call, "content": "12:00"}
    theirs = await ok(await rig.b.post(CHAT, json=body(*history, result, tools=TOOLS)))
    assert theirs["session_id"] != first["session_id"]
    waiting = await ok(await rig.a.get(f"/agentserve/sessions/{first['session_id']}"))
    assert (waiting["state"], waiting["turns"]) == ("WAITING_TOOL", 1)
    assert [call["id"] for call in waiting["pending_tool_calls"]] == [call]
    assert not [step for step in waiting["history"] if "answered" in step["reason"]]
    ours = await ok(await rig.a.post(CHAT, json=body(*history, result, tools=TOOLS)))
    assert ours["session_id"] == first["session_id"]


async def test_lists_and_counts_are_each_tenant_s_own() -> None:
    rig = Tenants(ScriptedEngine(say("hello")))
    outside = [await told(rig.b, ("GET", path, None), {}) for path in LOOKS]
    await things(rig)
    for _ in range(3):
        await ok(await rig.a.post(CHAT, json=body(user("again"))))
    assert [await told(rig.b, ("GET", path, None), {}) for path in LOOKS] == outside
    assert (await ok(await rig.b.get("/agentserve/sessions")))["total"] == 0
    assert (await ok(await rig.a.get("/agentserve/sessions")))["total"] > 3
    for path in ("/metrics", "/load", "/server_info"):
        assert (await rig.b.get(path)).status_code == 403


LOOKS = [
    "/health",
    "/ready",
    "/ping",
    "/version",
    "/v1/models",
    "/openapi.json",
    "/agentserve/sessions?detail=true",
    "/v1/agents",
    AGENTS,
]


async def test_the_cache_has_nothing_of_another_for_anybody() -> None:
    rig = Tenants(ScriptedEngine(say("hello")))

    async def cached(client: httpx.AsyncClient, **fields: Any) -> int:
        reply = await ok(await client.post(CHAT, json=body(**fields)))
        computed = reply["usage"]["agentserve"]["computed_tokens"]
        found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert computed == reply["usage"]["prompt_tokens"] - found + reply["usage"]["completion_tokens"]
        return found

    assert await cached(rig.a) == 0
    assert await cached(rig.a) > 0
    assert await cached(rig.a, cache_salt="s") == 0
    for fields in ({"session_id": "x"}, {"cache_salt": "s"}, {"cache_salt": "1:a:"}, {"cache_salt": "a"}):
        assert await cached(rig.b, **fields) == 0, fields
    assert await cached(rig.b) > 0
    for path, more in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/messages", {"messages": [user(PROMPT)], "max_tokens": 9}),
        ("/v1/responses", {"input": PROMPT}),
        ("/v1/messages", {"messages": [user(PROMPT)], "max_tokens": 0}),  # computed ahead, for nobody's turn
    ):
        await ok(await rig.a.post(path, json={"model": "tiny", **more}))
        await ok(await rig.b.post(path, json={"model": "tiny", **more}))
        left, right = rig.engine.submits[-2:]
        assert (left.namespace, right.namespace) == ("1:a:", "1:b:")


def test_keys_of_blocks_chain_over_the_namespace_so_that_tiers_below_hold_nothing_of_another() -> None:
    spaces = Namespaces(b"m" * 32)
    tokens = [array("i", range(i, i + 4)).tobytes() for i in range(8)]

    def keys(salt: str) -> list[bytes]:
        chain = [spaces.of(salt)]
        for page in tokens:
            chain.append(block_key(chain[-1], page))
        return chain

    assert keys("1:a:") == keys("1:a:")
    salts = ["", "1:a:", "1:b:", "1:a:x", "2:1::", "7:default:x"]
    assert len({key for salt in salts for key in keys(salt)}) == len(salts) * 9
    named = [
        namespace(tenant, salt) for tenant in ("default", "a", "1:a", "a:") for salt in (None, "x", "a:", ":")
    ]
    assert len(set(named)) == len(named)


def test_in_the_engine_a_turn_of_another_namespace_computes_all_its_tokens() -> None:
    rig = CoreRig(pages=(64,))
    prompt = list(range(30))
    for name, space in (("a1", "1:a:"), ("a2", "1:a:"), ("b1", "1:b:"), ("b2", "1:b:")):
        settings = Sampling(max_tokens=8, temperature=0.0)
        turn = Submit(SessionId(name), TurnId(1), pack_tokens(array("i", prompt)), settings, namespace=space)
        rig.core.handle(turn, rig.now)
        rig.drain()
    usage = {name: rig.ended(name).usage for name in ("a1", "a2", "b1", "b2")}
    assert [usage[name].cached for name in usage] == [0, 29, 0, 29]
    assert usage["b1"].computed == usage["a1"].computed  # so its time tells nothing either
    assert rig.output("b1") == rig.output("a1")


async def test_an_idempotency_key_is_its_tenant_s() -> None:
    rig = Tenants(ScriptedEngine(say("hello")))
    key = {"idempotency-key": "one"}
    for client, again in ((rig.a, False), (rig.a, True), (rig.b, False), (rig.b, True)):
        reply = await client.post(CHAT, json=body(), headers=key)
        assert ("idempotent-replayed" in reply.headers) is again
    assert len(rig.engine.submits) == 2


async def test_item_ids_that_another_chose_first_are_still_one_s_own() -> None:
    rig = Tenants(ScriptedEngine(say("hello")))
    made = {}
    for name, client, text in (("b", rig.b, "of b"), ("a", rig.a, "of a"), ("a2", rig.a, "of another a")):
        item = {"type": "message", "id": "msg_chosen", "role": "user", "content": text}
        made[name] = await ok(await client.post("/v1/responses", json={"model": "tiny", "input": [item]}))
    reference = {"type": "item_reference", "id": "msg_chosen"}
    request = {"model": "tiny", "input": [reference]}
    assert (await rig.a.post("/v1/responses", json=request)).status_code == 404  # whose it is nobody says
    request = {"model": "tiny", "input": [reference, user("more")], "previous_response_id": made["a"]["id"]}
    reply = await ok(await rig.a.post("/v1/responses", json=request))
    items = await ok(await rig.a.get(f"/v1/responses/{reply['id']}/input_items"))
    assert "of a" in json.dumps(items)
    assert "another" not in json.dumps(items)
    assert "of b" not in json.dumps(items)


async def test_a_comparison_with_another_s_response_finds_none() -> None:
    rig = Tenants(ScriptedEngine(say("hello")))
    for store in (True, False):
        first = {"model": "tiny", "input": PROMPT, "store": store}
        made = await ok(await rig.a.post("/v1/responses", json=first))
        for client, told_ in ((rig.b, "comparison_response_not_found"), (rig.a, "cache_hit")):
            asked = first | {"prompt_cache_options": {"comparison_response_id": made["id"]}}
            reply = await ok(await client.post("/v1/responses", json=asked))
            assert reply["prompt_cache_diagnostics"]["type"] == told_


async def test_one_tenant_s_sessions_push_out_its_own_only() -> None:
    config = TenantsConfig(TenantLimits(), {"a": TenantLimits(sessions=3)})
    rig = Tenants(ScriptedEngine(say("hello")), tenants=config)
    await ok(await rig.b.post(CHAT, json=body(user("mine"))))
    for number in range(8):
        await ok(await rig.a.post(CHAT, json=body(user(f"number {number}"))))
    assert (await ok(await rig.a.get("/agentserve/sessions")))["total"] == 3
    assert (await ok(await rig.b.get("/agentserve/sessions")))["total"] == 1


async def test_where_all_of_a_tenant_s_sessions_run_another_is_a_429() -> None:
    script = say("hello", hold_at=1)
    config = TenantsConfig(TenantLimits(sessions=1))
    rig = Tenants(ScriptedEngine(script), tenants=config)
    first = asyncio.create_task(rig.a.post(CHAT, json=body(user("one"))))
    await settled(lambda: rig.engine.submits)
    refused = await rig.a.post(CHAT, json=body(user("two")))
    assert (refused.status_code, refused.json()["error"]["limit"]) == (429, "sessions")
    script.release.set()
    assert (await first).status_code == 200
    assert (await rig.b.post(CHAT, json=body(user("three")))).status_code == 200


async def test_turns_at_once_tokens_and_stored_bytes() -> None:
    script = say("hello", hold_at=1)
    limits = TenantLimits(concurrent_turns=1, tokens_per_minute=150, stored_bytes=3000, request_bytes=2000)
    rig = Tenants(ScriptedEngine(script), tenants=TenantsConfig(TenantLimits(), {"a": limits}))
    first = asyncio.create_task(rig.a.post(CHAT, json=body(user("one"))))
    await settled(lambda: rig.engine.submits)
    refused = await rig.a.post(CHAT, json=body(user("two")))
    assert (refused.status_code, refused.json()["error"]["limit"]) == (429, "turns")
    assert (await rig.a.post(CHAT, json=body(user("two"), n=2))).status_code == 429
    script.release.set()
    await first
    large = await rig.a.post(CHAT, json=body(user("x" * 3000)))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    many = await rig.a.post(CHAT, json=body(user("one"), n=2, max_tokens=1))
    assert (many.status_code, many.json()["error"]["limit"]) == (429, "turns")
    rig.check_rest()
    while (reply := await rig.a.post(CHAT, json=body(user("x" * 80)))).status_code == 200:
        pass
    assert (reply.status_code, reply.json()["error"]["limit"]) == (429, "tokens")
    assert reply.headers["x-ratelimit-remaining-tokens"] == "0"
    talk = {"items": [{"role": "user", "content": "x" * 1500}]}
    kept = [(await rig.a.post("/v1/conversations", json=talk)).status_code for _ in range(4)]
    assert kept == [200, 200, 429, 429]
    assert (await rig.b.post("/v1/conversations", json=talk)).status_code == 200


@pytest.mark.parametrize("store", [True, False])
async def test_what_is_full_takes_responses_that_are_not_stored(store: bool) -> None:
    rig = Tenants(ScriptedEngine(say("hello")), tenants=TenantsConfig(TenantLimits(stored_bytes=600)))
    asked = {"model": "tiny", "input": "hi", "store": True}
    await ok(await rig.a.post("/v1/responses", json=asked))
    reply = await rig.a.post("/v1/responses", json=asked | {"store": store})
    assert reply.status_code == (429 if store else 200)
    rig.check_rest()
