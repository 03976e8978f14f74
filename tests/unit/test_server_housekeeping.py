"""Everything beside completions: health, models, metrics, tokens, keys, unknown paths."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentserve.clock import VirtualClock
from agentserve.messages import SessionView, TiersView
from agentserve.server.engine_port import FleetHealth, SeenSession, Silence, TierReport
from agentserve.types import SessionId, SessionState, TurnId
from tests.api_rig import CHAT, TOOLS, Rig, hermes, user
from tests.fakes import END, START, ScriptedEngine, say
from tests.hello import made_up_hello


async def test_health_shows_the_backend_and_fails_without_a_worker() -> None:
    rig = Rig()
    reply = await rig.client.get("/health")
    assert reply.status_code == 200
    assert (reply.json()["status"], reply.json()["backend"]) == ("ok", "reference")
    rig.engine.alive = 0
    reply = await rig.client.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "unavailable")


async def test_a_worker_that_is_silent_or_missing_is_told_and_does_not_end_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = VirtualClock()
    rig = Rig(clock=clock)
    clock.advance_to(clock.now() + 40.0)
    workers = FleetHealth(3, 1, (Silence(2, clock.now() - 12.0),))
    monkeypatch.setattr(rig.engine, "health", lambda: workers)
    reply = await rig.client.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (200, "degraded")
    silent, missing = reply.json()["degraded"]
    assert (silent["part"], silent["reason"]) == ("worker 2", "it has said nothing for 12 s")
    assert silent["since"] == pytest.approx(rig.context.unix(clock.now() - 12.0), abs=1e-3)
    assert missing == {"part": "workers", "reason": "1 of 3 run", "since": None}
    assert "agentserve_workers_silent 1.0" in (await rig.client.get("/metrics")).text
    workers = FleetHealth(1, 0, (Silence(0, clock.now() - 40.0),))
    reply = await rig.client.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "unavailable")
    assert [fault["part"] for fault in reply.json()["degraded"]] == ["worker 0"]


async def test_what_a_silent_worker_told_of_a_session_is_shown_as_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    reply = await rig.chat([user("a")])
    key, name = rig.engine.submits[0].session, reply["session_id"]
    assert not (await rig.session(name))["old"]
    view = SessionView(key, SessionState.IDLE, TurnId(1), 7, 7, 1, 0)
    for seen, shown in ((SeenSession(view, 0.0, old=True), 1), (SeenSession(None, None, old=True), 0)):

        async def told(names: Sequence[SessionId], seen: SeenSession = seen) -> dict[SessionId, SeenSession]:
            return dict.fromkeys(names, seen)

        monkeypatch.setattr(rig.engine, "describe_sessions", told)
        found = await rig.session(name)
        listed = (await rig.client.get("/agentserve/sessions?detail=true")).json()["data"]
        assert (found["old"], listed[0]["old"], found["pages"]) == (True, True, shown)
        assert (found["as_of"] is None) == (seen.at is None)


async def test_the_numbers_and_the_reason_for_the_backend() -> None:
    rig = Rig()
    rig.engine.hello = made_up_hello(
        weights="Q4_1/Q8_0", activations="int8", kv_dtype="fp16", backend_reason="cpu-avx2 (why)"
    )
    for path in ("/health", "/server_info"):
        reply = (await rig.client.get(path)).json()
        found = [reply[name] for name in ("dtype", "weights", "activations", "kv_dtype")]
        assert found == ["bf16", "Q4_1/Q8_0", "int8", "fp16"]
    assert reply["backend_reason"] == "cpu-avx2 (why)"


async def test_a_reply_names_all_that_decides_its_numbers() -> None:
    rig = Rig()
    seen = set()
    for namespace in ("12" * 32, "34" * 32):  # one file's weights, two settings
        rig.engine.hello = made_up_hello(namespace=namespace)
        seen.add((await rig.chat([user("a")]))["system_fingerprint"])
    assert seen == {"agentserve-121212121212", "agentserve-343434343434"}


async def test_models_and_aliases() -> None:
    rig = Rig(aliases=("org/other",))
    listed = (await rig.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/other"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert (await rig.client.get("/v1/models/org/other")).json()["root"] == "tiny"
    missing = await rig.client.get("/v1/models/nope")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    reply = await rig.post(CHAT, {"messages": [user("a")], "model": "nope"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")
    assert (await rig.chat([user("a")], model="org/other"))["model"] == "org/other"


async def test_tokenize_and_detokenize() -> None:
    rig = Rig()
    reply = (await rig.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json()
    assert reply["tokens"] == [*"hé".encode()]
    assert (reply["count"], reply["max_model_len"]) == (3, 4096)
    assert reply["token_strs"][0] == "h"
    reply = (await rig.post("/tokenize", {"messages": [user("a")]})).json()
    assert reply["tokens"][0] == START
    back = (await rig.post("/detokenize", {"tokens": [*"hé".encode(), END]})).json()
    assert back == {"prompt": "hé<|im_end|>"}
    for body in ({}, {"prompt": "a", "messages": [user("a")]}):
        assert (await rig.post("/tokenize", body)).status_code == 400
    assert (await rig.post("/detokenize", {"tokens": [300]})).status_code == 400


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_the_prefix_cache_can_be_reset(path: str) -> None:
    rig = Rig()
    assert (await rig.client.post(path)).json() == {"success": True}
    assert rig.engine.resets == 1


async def test_version_and_ping() -> None:
    rig = Rig(version="2026.12.0")
    assert (await rig.client.get("/version")).json() == {"version": "2026.12.0"}
    assert (await rig.client.get("/ping")).status_code == 200


async def test_unknown_paths_and_methods_get_json() -> None:
    rig = Rig()
    reply = await rig.client.get("/nope")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    reply = await rig.client.get(CHAT)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert "error" in reply.json()


async def test_every_reply_has_a_request_id() -> None:
    rig = Rig()
    given = await rig.client.get("/health", headers={"X-Request-ID": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for bad in ("x" * 129, "a b"):
        made = await rig.client.get("/nope", headers={"X-Request-ID": bad})
        assert made.headers["x-request-id"].startswith("req-")
    reply = await rig.post(CHAT, {"messages": [user("a")], "request_id": "in-body"})
    assert reply.headers["x-request-id"] == "in-body"


async def test_one_request_id_twice_at_once_is_two_requests() -> None:
    rig = Rig()
    for _ in range(2):
        await rig.post(CHAT, {"messages": [user("a")], "request_id": "same"})
    assert len({submit.session for submit in rig.engine.submits}) == 2


async def test_keys_guard_everything_but_health() -> None:
    rig = Rig(api_keys=("secret-1", "secret-2"))
    assert (await rig.client.get("/health")).status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secret"}):
        reply = await rig.client.get("/v1/models", headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "x-request-id" in reply.headers
    for headers in ({"Authorization": "Bearer secret-2"}, {"x-api-key": "secret-1"}):
        assert (await rig.client.get("/v1/models", headers=headers)).status_code == 200


async def test_metrics_count_what_happened() -> None:
    rig = Rig(ScriptedEngine(say("abc")))
    await rig.chat([user("a")])
    await rig.chat([user("a")])
    await rig.post(CHAT, {"messages": []})
    text = (await rig.client.get("/metrics")).text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    prompt = len(rig.engine.submits[0].tokens) // 4
    assert samples["agentserve_turns_total", "stop"] == 2
    assert samples["agentserve_turns_total", "refused"] == 0
    assert samples["agentserve_prompt_tokens_total",] == 2 * prompt
    assert samples["agentserve_cached_tokens_total",] == prompt - 1
    assert samples["agentserve_generated_tokens_total",] == 8
    assert samples["agentserve_time_to_first_token_seconds_count",] == 2
    assert samples["agentserve_time_between_tokens_seconds_count",] == 6
    assert samples["agentserve_turns_active",] == 0
    assert samples["agentserve_sessions", "IDLE"] == 2
    assert samples["agentserve_kv_pages_cached",] == 20
    assert samples["agentserve_kv_pages_live",] == 4
    assert samples["agentserve_http_errors_total", "4xx"] == 1
    assert samples["agentserve_workers",] == 1


async def test_health_names_the_tiers_that_are_there() -> None:
    rig = Rig()
    assert (await rig.client.get("/health")).json()["tiers"] == {"device": {"state": "ok"}}
    view = TiersView(policy="priced", host=3, host_slots=8, block_bytes=1000)
    rig.engine.tier_reports = (TierReport(0, view),)
    assert (await rig.client.get("/health")).json()["tiers"] == {
        "device": {"state": "ok"},
        "host": {"state": "ok", "bytes": 3000, "capacity_bytes": 8000},
        "policy": "priced",
    }


async def test_health_says_since_when_and_why_a_disk_fails() -> None:
    rig = Rig()
    fine = TiersView(host_slots=8, block_bytes=1000, disk_budget=5000, disk_bytes=700)
    bad = msgspec.structs.replace(fine, disk_error="no space left on device")
    rig.engine.tier_reports = (TierReport(0, fine), TierReport(1, fine))
    assert (await rig.client.get("/health")).json()["tiers"]["disk"] == {
        "state": "ok",
        "bytes": 1400,
        "capacity_bytes": 10000,
    }
    context = rig.context
    rig.engine.tier_reports = (TierReport(0, fine), TierReport(1, bad, context.clock_at_start + 2.0))
    reply = await rig.client.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (200, "ok"), "it serves without its disk"
    disk = reply.json()["tiers"]["disk"]
    (fault,) = reply.json()["degraded"]
    assert fault == {"part": "tiers.disk", "reason": disk["reason"], "since": disk["since"]}
    assert (disk["state"], disk["reason"], disk["workers"]) == ("failing", "no space left on device", [1])
    assert disk["since"] == pytest.approx(context.started + 2.0, abs=1e-3)
    absent = msgspec.structs.replace(fine, disk_budget=0, disk_bytes=0, disk_error="no KV can be kept in d")
    rig.engine.tier_reports = (TierReport(0, absent, context.clock_at_start + 2.0),)
    disk = (await rig.client.get("/health")).json()["tiers"]["disk"]
    assert (disk["state"], disk["reason"]) == ("failing", "no KV can be kept in d"), "there should be one"


async def test_waits_for_tools_are_counted_by_name() -> None:
    rig = Rig(ScriptedEngine(say(hermes("weather", '{"city": "Rome"}'))))
    reply = await rig.chat([user("a")], tools=TOOLS)
    call = reply["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "sunny"}
    session = await rig.session(reply["session_id"])
    assert (session["history"][-1]["state"], session["history"][-1]["tools"]) == ("WAITING_TOOL", ["weather"])
    await rig.chat([user("a"), call, result], tools=TOOLS)
    text = (await rig.client.get("/metrics")).text
    assert 'agentserve_tool_wait_seconds_count{tool="weather"} 1.0' in text
    assert 'agentserve_tier_hit_tokens_total{tier="disk"} 0.0' in text


async def test_a_fault_of_ours_is_a_500_without_a_trace() -> None:
    class Bad(ScriptedEngine):
        def submit(self, command):
            raise RuntimeError("secret detail")

    rig = Rig(Bad())
    reply = await rig.post(CHAT, {"messages": [user("a")]})
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert "x-request-id" in reply.headers
    rig.check_rest()


async def test_server_info_says_what_runs() -> None:
    rig = Rig(version="2026.12.0", aliases=("org/other",))
    info = (await rig.client.get("/server_info")).json()
    assert (info["server"], info["version"], info["model"]) == ("agentserve", "2026.12.0", "tiny")
    assert (info["model_aliases"], info["workers"], info["max_model_len"]) == (["org/other"], 1, 4096)
    assert info["uptime_seconds"] >= 0


async def test_a_link_cannot_flush_the_cache() -> None:
    rig = Rig()
    for path in ("/flush_cache", "/reset_prefix_cache"):
        assert (await rig.client.get(path)).status_code == 405
    assert rig.engine.resets == 0


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_bodies_a_web_page_may_send_unasked_are_refused(kind: str) -> None:
    rig = Rig()
    for path, body in ((CHAT, {"messages": [user("a")]}), ("/tokenize", {"prompt": "a"})):
        reply = await rig.post(path, body, {"content-type": kind})
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
        reply = await rig.post(path, body, {"content-type": "Application/JSON; charset=utf-8"})
        assert reply.status_code == 200
    assert len(rig.engine.submits) == 1


@pytest.mark.parametrize(
    ("header", "value", "ours"),
    [
        ("host", "localhost", True),
        ("host", "LOCALHOST:8000", True),
        ("host", "127.0.0.1:8000", True),
        ("host", "127.9.9.9", True),
        ("host", "[::1]:8000", True),
        ("host", "my-machine:8000", True),
        ("host", "evil.example", False),
        ("host", "evil.example:8000", False),
        ("host", "localhost.evil.example", False),
        ("host", "192.168.1.2:8000", False),
        ("host", "[::2]:8000", False),
        ("host", "", False),
        ("origin", "http://localhost:3000", True),
        ("origin", "https://evil.example", False),
        ("origin", "null", False),
    ],
)
async def test_without_keys_only_this_machine_is_served(header: str, value: str, ours: bool) -> None:
    rig = Rig(host="my-machine")
    for path in ("/v1/models", "/health"):
        reply = await rig.client.get(path, headers={header: value})
        assert reply.status_code == (200 if ours else 403)
    if not ours:
        assert reply.json()["error"]["code"] == f"foreign_{header}"
    keyed = Rig(api_keys=("k",))
    reply = await keyed.client.get("/v1/models", headers={header: value, "x-api-key": "k"})
    assert reply.status_code == 200


async def test_detokenize_takes_a_context_of_ids() -> None:
    rig = Rig(ScriptedEngine(max_model_len=64))
    assert (await rig.post("/detokenize", {"tokens": [97] * 64})).json() == {"prompt": "a" * 64}
    reply = await rig.post("/detokenize", {"tokens": [97] * 65})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")
