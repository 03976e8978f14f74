"""Caches besides KV, places and addresses: a hit of one tenant's is no other's, and no count is told."""

from __future__ import annotations

import re
import sys
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from agentserve.server.agents.records import AgentConfig, Head
from agentserve.server.agents.shelf import Shelf
from agentserve.server.http.connections import Connections, WireBounds, counted_as
from agentserve.server.http.responses.desk import Desk, DeskBounds
from agentserve.text import Tokenizer, hf_vocab, pieces
from tests.api_rig import CHAT, TOOLS, hermes, settled, user
from tests.fakes import ByteTemplate, ScriptedEngine, say
from tests.hf_tokenizers import KINDS, save
from tests.tenants_rig import Tenants
from tests.unit.test_server_isolation import TRIES, filled, things, told, unknown
from tools_bridge.grammar import ResponseFormat, ToolChoice
from tools_bridge.registry import ReplyForm
from tools_bridge.reply_request import GrammarRequest, grammar_request

MOST_CALLS = 3  # of some hundreds, between an id of another's and one that never was
AgentBounds = type(Shelf()._bounds)
SECRET = "The code of the vault is 4711."
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


# --- texts ---------------------------------------------------------------------------------


def test_a_text_that_was_encoded_for_one_is_encoded_again_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(hf_vocab.vocabulary(save(KINDS[next(iter(KINDS))](), tmp_path)))
    encoded: list[str] = []
    real = pieces.encode

    def counted(text: str, *encoders: Any) -> Any:
        encoded.append(text)
        return real(text, *encoders)

    monkeypatch.setattr("agentserve.text.tokenizer.encode", counted)
    a, b = tokenizer.apart("a"), tokenizer.apart("b")
    ids = a.encode(SECRET)
    for again, computed in ((a, 1), (tokenizer.apart("a"), 1), (b, 2), (b, 2), (tokenizer, 3)):
        assert again.encode(SECRET) == ids
        assert len(encoded) == computed
    assert b.decode(ids) == SECRET


class Renders:
    """Which tenants' requests were rendered."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()


class OwnedTemplate(ByteTemplate):
    def __init__(self, seen: Renders, owner: str = "") -> None:
        self.seen = seen
        self.owner = owner

    def apart(self, owner: str) -> OwnedTemplate:
        other = copy(self)
        other.owner = owner
        return other

    def render(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.of[self.owner] += 1
        return super().render(*args, **kwargs)


async def test_every_route_renders_and_compiles_for_its_tenant_alone() -> None:
    seen = Renders()
    rig = Tenants(ScriptedEngine(say("hello")), OwnedTemplate(seen))
    owners: list[str] = []
    real = rig.grammars.source
    rig.grammars.source = lambda form, end, owner="": owners.append(owner) or real(form, end)  # type: ignore[method-assign,assignment,func-returns-value]
    chat = {"model": "tiny", "messages": [user(SECRET)], "max_tokens": 50}
    asked = [
        (CHAT, chat | {"response_format": SCHEMA}),
        ("/v1/messages", chat),
        ("/v1/messages", chat | {"max_tokens": 0}),
        ("/v1/messages/count_tokens", chat),
        ("/v1/responses", {"model": "tiny", "input": SECRET, "text": {"format": {"type": "json_object"}}}),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": SECRET}),
        ("/tokenize", {"messages": [user(SECRET)]}),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "response_format": SCHEMA}),
    ]
    for client, name in ((rig.a, "a"), (rig.b, "b")):
        before = seen.of[name]
        for path, body in asked:
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, (path, reply.text)
        rig.engine.reply = say(hermes("now", "{}"))
        turn = (await client.post(CHAT, json=chat | {"tools": TOOLS})).json()
        rig.engine.reply = say("hello")
        call = turn["choices"][0]["message"]["tool_calls"][0]["id"]
        place = f"/agentserve/sessions/{turn['session_id']}/tool_results/{call}/stream"
        assert (await client.post(place, content=b"noon" * 300)).status_code == 200
        assert seen.of[name] >= before + len(asked)
    assert {submit.tenant for submit in rig.engine.submits} == {"a", "b"}
    assert set(seen.of) == {"a", "b"}, "something is rendered for nobody, which all would find"
    assert owners == ["a"] * (len(owners) // 2) + ["b"] * (len(owners) // 2)
    assert len(owners) >= 6


def request(owner: str) -> GrammarRequest:
    wanted = ResponseFormat("json_object")
    return grammar_request(
        ReplyForm(), [], ToolChoice("none"), parallel=True, response=wanted, thinking="no", owner=owner
    )


def test_grammars_are_known_by_their_owner() -> None:
    owners = ["", "a", "b", "1:a", "a:", "ä"]
    ids = {owner: request(owner).id for owner in owners}
    assert len(set(ids.values())) == len(owners)
    assert request("a").id == ids["a"]
    assert request("a").data == request("b").data  # what is compiled knows nothing of it


# --- places --------------------------------------------------------------------------------


async def test_places_in_the_background_tell_each_tenant_of_its_own() -> None:
    rig = Tenants(ScriptedEngine(say("hello", hold_at=1)), responses=Desk(bounds=DeskBounds(running=16)))
    asked = {"model": "tiny", "input": "x", "background": True}

    async def post(client: Any) -> Any:
        return await client.post("/v1/responses", json=asked)

    replies = [await post(rig.a) for _ in range(16)]
    assert [reply.status_code for reply in replies] == [200] * 14 + [429] * 2
    assert "14 responses" in replies[-1].json()["error"]["message"]
    assert [(await post(rig.b)).status_code for _ in range(2)] == [200, 200]
    full = await post(rig.b)
    assert (full.status_code, full.headers["retry-after"]) == (503, "5")
    assert not any(digit in full.json()["error"]["message"] for digit in ("14", "16"))
    await rig.context.background.stop()
    await settled(lambda: not rig.context.responses.lives.running)
    assert not rig.context.responses.lives._reserved


# --- addresses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_a_network_of_ipv6_is_one_client(address: str, counted: str) -> None:
    assert counted_as(address) == counted


def test_who_has_a_network_has_the_connections_of_one() -> None:
    open_ = Connections(WireBounds(connections=100, per_address=3))
    mine = [counted_as(f"2001:db8::{number:x}") for number in range(5)]
    assert [open_.admit(address) for address in mine] == [True] * 3 + [False] * 2
    assert open_.admit(counted_as("2001:db8:0:1::1"))
    for address in mine[:3]:
        open_.left(address)
    assert open_.admit(mine[0])


# --- no other path -------------------------------------------------------------------------


async def test_ids_of_another_take_the_path_of_ids_that_never_were() -> None:
    """Not the body alone is the same, but what is done for it: as many calls of Python functions, up to the
    few that tell an own thing from another's, no wait, no disk."""
    rig = Tenants(ScriptedEngine())
    mine = await things(rig)
    real, made_up = mine.ids(), {name: unknown(id_) for name, id_ in mine.ids().items()}

    async def calls(attempt: Any, ids: dict[str, str]) -> int:
        count = 0

        def see(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call" and "/agentserve/" in frame.f_code.co_filename

        sys.setprofile(see)
        try:
            await told(rig.b, attempt, ids)
        finally:
            sys.setprofile(None)
        return count

    apart = {}
    for attempt in TRIES:
        await calls(attempt, made_up)  # what is done once only
        least = [min([await calls(attempt, ids) for _ in range(2)]) for ids in (made_up, real)]
        if (difference := least[1] - least[0]) != 0:
            apart[f"{attempt[0]} {attempt[1]} {filled(attempt[2], {})}"[:90]] = difference
    assert all(abs(difference) <= MOST_CALLS for difference in apart.values()), apart


async def test_places_of_agents_tell_each_tenant_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentserve.server.agents.office.MOST_RUNNING", 8)
    rig = Tenants(ScriptedEngine(say("hello", hold_at=1)), agents=Shelf(AgentBounds(agents=8)))
    agent = {"model": "tiny"}
    asked = {"agent": agent, "environment": {"type": "none"}, "input": "hi"}

    async def tried(client: Any, path: str, body: Any, times: int) -> tuple[list[int], str]:
        replies = [await client.post(path, json=body) for _ in range(times)]
        return [reply.status_code for reply in replies], replies[-1].json()["error"]["message"]

    status, said = await tried(rig.a, "/v1/agents/sessions", asked, 8)
    assert (status, said[:11]) == ([200] * 7 + [429], "7 turns run")
    assert await tried(rig.b, "/v1/agents/sessions", asked, 2) == ([200, 503], "The server is busy.")
    status, said = await tried(rig.a, "/v1/agents", agent, 8)
    assert (status, "7 agents" in said) == ([200] * 7 + [503], True)
    status, said = await tried(rig.b, "/v1/agents", agent, 2)
    assert status == [200, 503]
    assert not re.search(r"\d", said)
    await rig.context.agents.stop()


def test_one_tenant_s_agents_sessions_push_out_its_own_only() -> None:
    def head(name: str, tenant: str) -> Head:
        return Head(name, tenant, AgentConfig("g", "tiny"), created=0.0, active=0.0)

    for bounds in (AgentBounds(sessions=10), AgentBounds(bytes=40_000)):
        shelf = Shelf(bounds)
        first = shelf.open(head("b0", "b"))
        for number in range(200):
            shelf.open(head(f"a{number}", "a"))
        assert shelf.has(first)
        assert 3 < len(shelf.sessions("a")) < 200
