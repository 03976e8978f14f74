"""What requests of every dialect are promised, and what their clients are told of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentserve.messages import Submit
from agentserve.slo_classes import SloClass, SloConfig
from agentserve.tenant_limits import TenantLimits, TenantsConfig
from agentserve.types import NO_SLO, FinishReason, Slo
from tests.agents_rig import body as agent_body
from tests.agents_rig import created
from tests.api_rig import CHAT, TOOLS, Rig, user
from tests.fakes import Script, ScriptedEngine, say
from tests.messages_rig import minimal
from tests.tenants_rig import Tenants
from tests.waiting_sessions import followed, waiting

FAST = SloClass(Slo(ttft=1.0, tbt=0.1), shed=True)
SLO = SloConfig(
    {"fast": FAST, "vip": SloClass(Slo(ttft=0.2), tenants=("b",)), "flex": SloClass(Slo(total=60.0))}
)
SHED = Script([], FinishReason.SHED, "1 s were promised.", wait=6.2)

Ask = Callable[..., Awaitable[Any]]


def _agents(rig: Rig, fields: dict[str, Any], headers: dict[str, str] | None) -> Awaitable[Any]:
    return rig.post("/v1/agents/sessions", agent_body(fields, input="hi", stream=True), headers)


DIALECTS: dict[str, Callable[[Rig, dict[str, Any], dict[str, str] | None], Awaitable[Any]]] = {
    "chat": lambda rig, fields, headers: rig.post(CHAT, {"messages": [user("hi")], **fields}, headers),
    "completions": lambda rig, fields, headers: rig.post(
        "/v1/completions", {"prompt": "hi", **fields}, headers
    ),
    "responses": lambda rig, fields, headers: rig.post(
        "/v1/responses", {"model": "tiny", "input": "hi", **fields}, headers
    ),
    "messages": lambda rig, fields, headers: rig.post("/v1/messages", minimal(**fields), headers),
    "agents": _agents,
}
EVERY = pytest.mark.parametrize("dialect", DIALECTS)


async def asked(
    dialect: str, rig: Rig, fields: dict[str, Any], headers: dict[str, str] | None = None, status: int = 200
) -> Any:
    reply = await DIALECTS[dialect](rig, fields, headers)
    assert reply.status_code == status, reply.text
    return reply


def promised(rig: Rig) -> tuple[Slo, bool]:
    last: Submit = rig.engine.submits[-1]
    return last.slo, last.shed


@EVERY
async def test_every_dialect_says_it_in_its_body_or_a_header(dialect: str) -> None:
    rig = Rig(ScriptedEngine(), slo=SLO)
    await asked(dialect, rig, {})
    assert promised(rig) == (NO_SLO, False)
    await asked(dialect, rig, {"slo": "fast"})
    assert promised(rig) == (FAST.slo, True)
    await asked(dialect, rig, {"slo": {"class": "fast", "ttft": 5, "total": 9.5, "shed": False}})
    assert promised(rig) == (Slo(ttft=5.0, tbt=0.1, total=9.5), False)
    await asked(dialect, rig, {"slo": {"tpot": 0.05}})
    assert promised(rig) == (Slo(tpot=0.05), False)
    await asked(dialect, rig, {}, {"x-slo": "fast"})
    assert promised(rig) == (FAST.slo, True)
    await asked(dialect, rig, {}, {"x-slo": "class=fast, tbt=0.5,shed=false"})
    assert promised(rig) == (Slo(ttft=1.0, tbt=0.5), False)
    await asked(dialect, rig, {"slo": "flex"}, {"x-slo": "fast"})
    assert promised(rig) == (Slo(total=60.0), False), "the body says more"
    await asked(dialect, rig, {"service_tier": "flex"})
    assert promised(rig) == (Slo(total=60.0), False)
    await asked(dialect, rig, {"service_tier": "priority"})
    assert promised(rig) == (NO_SLO, False), "no class is called so"


@EVERY
@pytest.mark.parametrize(
    ("slo", "param", "told"),
    [
        ("best", "slo", "there is no class 'best' for this tenant; classes are fast, flex"),
        ("vip", "slo", "there is no class 'vip' for this tenant; classes are fast, flex"),
        ({"class": "vip"}, "slo.class", "there is no class 'vip'"),
        ({"ttft": 0}, "slo.ttft", "expected seconds above 0, got 0.0"),
        ({"tbt": -1e300}, "slo.tbt", "expected seconds above 0"),
    ],
)
async def test_what_cannot_be_had_is_a_400_that_says_so(
    dialect: str, slo: Any, param: str, told: str
) -> None:
    rig = Rig(ScriptedEngine(), slo=SLO)
    reply = await asked(dialect, rig, {"slo": slo}, status=400)
    error = reply.json()["error"]
    assert told in error["message"]
    if dialect != "messages":
        assert error["param"] == (f"agent.{param}" if dialect == "agents" else param)
        assert error["code"] == "invalid_slo"
    assert not rig.engine.submits
    rig.check_rest()


@EVERY
@pytest.mark.parametrize("slo", [7, {"ttft": "soon"}, {"ttft": True}, {"ttft_ms": 5}, [], {"class": 3}])
async def test_what_is_no_slo_is_a_400(dialect: str, slo: Any) -> None:
    rig = Rig(ScriptedEngine(), slo=SLO)
    reply = await asked(dialect, rig, {"slo": slo}, status=400)
    assert "slo" in reply.json()["error"]["message"]
    assert not rig.engine.submits


@EVERY
@pytest.mark.parametrize(
    "header",
    ["best", "ttft=soon", "ttft=nan", "ttft=1,ttft=2", "what=1", "shed=maybe", "=", "x" * 600, "ttft=inf"],
)
async def test_a_header_that_says_nothing_sensible_is_a_400(dialect: str, header: str) -> None:
    rig = Rig(ScriptedEngine(), slo=SLO)
    await asked(dialect, rig, {}, {"x-slo": header}, status=400)
    assert not rig.engine.submits


async def test_a_tenant_has_its_own_class_and_no_other_tenants() -> None:
    rig = Tenants(ScriptedEngine(), slo=SLO, tenants=TenantsConfig(classes={"b": "vip"}))
    chat = {"model": "tiny", "messages": [user("hi")]}
    assert (await rig.a.post(CHAT, json=chat)).status_code == 200
    assert promised(rig) == (NO_SLO, False)
    assert (await rig.b.post(CHAT, json=chat)).status_code == 200
    assert promised(rig) == (Slo(ttft=0.2), False)
    assert (await rig.b.post(CHAT, json={**chat, "slo": "fast"})).status_code == 200
    assert promised(rig) == (FAST.slo, True)
    refused = await rig.a.post(CHAT, json={**chat, "slo": "vip"})
    assert refused.status_code == 400
    assert "vip" not in refused.json()["error"]["message"].partition(";")[2]


# --- shedding --------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_is_shed_is_told_when_to_come_back(dialect: str, stream: bool) -> None:
    rig = Rig(ScriptedEngine(SHED), slo=SLO)
    reply = await asked(dialect, rig, {"slo": "fast", "stream": stream}, status=503)
    assert (reply.headers["retry-after"], reply.headers["x-should-retry"]) == ("7", "true")
    error = reply.json()["error"]
    if dialect == "messages":
        assert reply.json()["type"] == "error"
        assert error["type"] == "overloaded_error"
        assert error["details"] == {"retry_after": 7}
    else:
        assert (error["type"], error["code"], error["retry_after"]) == ("server_error", "slo_unattainable", 7)
    assert "1 s were promised. Please try again in 7 s." in error["message"]
    rig.check_rest()
    rig.engine.reply = say("Now.")
    await asked(dialect, rig, {"slo": "fast", "stream": stream})


async def test_an_agents_turn_that_is_shed_has_failed_and_the_session_goes_on() -> None:
    rig = Rig(ScriptedEngine(), slo=SLO)
    agent = await created(rig, SHED, agent={"slo": "fast"}, input="hi")
    await agent.until("idle")
    turn = (await agent.get("/turns"))["data"][0]
    assert turn["status"] == "failed"
    assert turn["error"]["code"] == "server_overloaded"
    rig.engine.reply = say("Now.")
    await agent.say("again")
    await agent.until("idle")
    assert (await agent.get("/turns"))["data"][0]["status"] == "completed"


async def test_a_session_that_waits_for_its_tools_still_does_after_a_turn_was_shed() -> None:
    made = await waiting(Rig(ScriptedEngine(), slo=SLO), slo="fast")
    made.rig.engine.reply = SHED
    await made.give(0, "rain")
    refused = await made.give(1, "noon")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "7"
    assert promised(made.rig) == (FAST.slo, True), "as the request before it said"
    shown = await made.rig.session(made.id)
    assert shown["state"] == "WAITING_TOOL"
    made.rig.engine.reply = say("It rains.")
    again = await made.give(1, "noon")
    assert again.status_code == 200, again.text
    assert again.json()["choices"][0]["message"]["content"] == "It rains."


async def test_only_the_first_of_several_choices_may_be_shed() -> None:
    """What has begun is not broken off for a queue."""
    rig = Rig(ScriptedEngine(), slo=SLO)
    await asked("chat", rig, {"slo": "fast", "n": 3})
    assert [submit.shed for submit in rig.engine.submits] == [True, False, False]
    assert {submit.slo for submit in rig.engine.submits} == {FAST.slo}


async def test_later_model_calls_of_an_agents_turn_are_not_shed() -> None:
    rig = Rig(ScriptedEngine(), slo=SLO)
    agent = await created(
        rig,
        say('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        agent={"slo": "fast", "tools": [{"type": "function", "name": "now"}]},
        input="hi",
    )
    await agent.until("requires_action")
    rig.engine.reply = say("Noon.")
    calls = [item for item in (await agent.items()) if item["type"] == "function_call"]
    await agent.give(calls[0], "noon")
    await agent.until("idle")
    assert [(submit.slo, submit.shed) for submit in rig.engine.submits] == [
        (FAST.slo, True),
        (FAST.slo, False),
    ]


async def test_a_shed_turn_costs_its_tenant_no_tokens() -> None:
    limits = TenantsConfig(TenantLimits(tokens_per_minute=10_000))
    rig = Rig(ScriptedEngine(SHED), slo=SLO, tenants=limits)
    reply = await asked("chat", rig, {"slo": "fast"}, status=503)
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) >= 9_999
    tally = rig.context.accounts.tallies["default"]
    assert (tally.turns, tally.prompt_tokens, tally.shed) == (0, 0, 1)


# --- what is told ----------------------------------------------------------------------------


async def test_usage_events_and_metrics_say_what_became_of_it() -> None:
    rig = Rig(ScriptedEngine(say("a", kept=("tbt",), missed=("ttft",), relegated=True)), slo=SLO)
    reply = await rig.chat([user("hi")], slo="fast", tools=TOOLS)
    assert reply["usage"]["agentserve"]["slo"] == {"met": False, "missed": ["ttft"], "relegated": True}
    rig.engine.reply = say("b", kept=("ttft", "tbt"))
    chunks = await rig.chat_stream([user("ho")], slo="fast", stream_options={"include_usage": True})
    assert chunks[-2]["usage"]["agentserve"]["slo"] == {"met": True, "missed": [], "relegated": False}
    rig.engine.reply = say("c")
    assert "slo" not in (await rig.chat([user("hu")]))["usage"]["agentserve"]
    rig.engine.reply = SHED
    await asked("chat", rig, {"slo": "fast"}, status=503)

    page = (await rig.client.get("/metrics")).text
    for line in (
        'agentserve_tenant_slo_total{kind="ttft",outcome="missed",tenant="default"} 1.0',
        'agentserve_tenant_slo_total{kind="ttft",outcome="kept",tenant="default"} 1.0',
        'agentserve_tenant_slo_total{kind="tbt",outcome="kept",tenant="default"} 2.0',
        'agentserve_tenant_slo_turns_total{done="relegated",tenant="default"} 1.0',
        'agentserve_tenant_slo_turns_total{done="shed",tenant="default"} 1.0',
        'agentserve_turns_total{finish_reason="shed"} 1.0',
        "agentserve_engine_slo_shed 0.0",
    ):
        assert line in page, line


async def test_the_sessions_events_tell_of_a_promise_that_was_not_kept() -> None:
    rig = Rig(ScriptedEngine(say("a", missed=("ttft",), relegated=True)), slo=SLO)
    name = (await rig.chat([user("hi")], slo="fast"))["session_id"]
    told = [event for event in await followed(rig, name) if event.kind == "slo_missed"]
    assert [(event.data["missed"], event.data["relegated"]) for event in told] == [(["ttft"], True)]
