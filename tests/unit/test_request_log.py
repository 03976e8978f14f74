"""One line for every request, however it ended, with fields that agree; and its metrics, by tenant."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentserve.messages import PreemptionCounts, StateChange, Submit, Token, TurnEnded, TurnUsage
from agentserve.metrics import Metrics
from agentserve.records.lines import Line, Opened, RequestRecord, Status
from agentserve.records.reader import read_records
from agentserve.records.writer import Bounds, LineWriter
from agentserve.request_metrics import OTHER
from agentserve.server.engine_port import TurnEvent
from agentserve.server.sessions.origin import Origin
from agentserve.server.sessions.request_log import RequestLog
from agentserve.tenant_limits import TenantLimits, TenantsConfig
from agentserve.types import FinishReason, SessionId, SessionState, Slo, TurnId
from tests.api_rig import CHAT, settled, user
from tests.fakes import Script, ScriptedEngine, say
from tests.tenants_rig import A, Tenants, with_key

SESSION, TURN = SessionId("sess-1"), TurnId(1)


class Lines:
    """Where lines go in place of a file."""

    def __init__(self) -> None:
        self.lines: list[RequestRecord] = []
        self.lost = 0

    def add(self, line: Line) -> None:
        assert isinstance(line, RequestRecord)
        self.lines.append(line)

    def close(self, seconds: float = 5.0) -> None:
        pass


class Recorded(Tenants):
    def __init__(self, engine: ScriptedEngine | None = None, **options: Any) -> None:
        self.kept = Lines()
        super().__init__(engine, recording=self.kept, **options)

    @property
    def lines(self) -> list[RequestRecord]:
        for line in self.kept.lines:
            check(line)
        return self.kept.lines

    async def counts(self) -> dict[str, float]:
        page = (await self.admin.get("/metrics")).text
        return {
            name: float(value) for name, value in re.findall(r"^(agentserve_\S+) (\S+)$", page, re.MULTILINE)
        }


def check(line: RequestRecord) -> None:
    """Times are in order, counts agree with each other."""
    known = [line.arrival_ts, line.submit_ts, line.admit_ts, *line.token_times, line.finish_ts]
    times = [at for at in known if at is not None]
    assert all(before <= after + 2e-6 for before, after in pairwise(times)), line
    assert len(line.every_token_ts) == line.output_tokens
    assert (line.first_token_ts is None) == (not line.output_tokens)
    if line.first_token_ts is not None:
        assert line.first_token_ts == pytest.approx(line.token_times[0], abs=2e-6)
        assert line.admit_ts is not None
    if line.prefix_hit_tokens is not None:
        assert 0 <= line.prefix_hit_tokens <= line.prompt_tokens


def body(text: str = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [user(text)], **more}


async def test_a_turn_has_all_of_its_fields() -> None:
    rig = Recorded()
    reply = await rig.a.post(CHAT, json=body("a secret sentence"), headers={"x-request-id": "mine"})
    again = [user("a secret sentence"), reply.json()["choices"][0]["message"], user("more")]
    await rig.a.post(CHAT, json={"model": "tiny", "messages": again, "max_tokens": 3, "stream": True})
    first, second = rig.lines
    assert (first.request, first.route, first.tenant) == ("mine", CHAT, "a")
    assert (first.status, first.reason) == (Status.COMPLETED, "stop")
    assert first.session == second.session == reply.headers["x-session-id"]
    assert (first.turn, second.turn) == (1, 2)
    usage = reply.json()["usage"]
    assert (first.prompt_tokens, first.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (first.prefix_hit_tokens, second.status, second.output_tokens) == (0, Status.LENGTH, 3)
    assert second.prefix_hit_tokens == usage["prompt_tokens"] + usage["completion_tokens"]
    assert first.policy == rig.engine.hello.policy
    assert (first.slo, first.slo_met) == (None, None)
    assert "secret" not in repr(rig.lines)


async def test_every_choice_has_a_line_and_one_arrival() -> None:
    rig = Recorded()
    await rig.a.post(CHAT, json=body(n=3))
    lines = rig.lines
    assert len({line.session for line in lines}) == 3
    assert len({line.request for line in lines}) == 1
    assert len({line.arrival_ts for line in lines}) == 1


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (Script([], FinishReason.REFUSED, "no"), Status.REJECTED, "request_refused"),
        (Script([1, 2], FinishReason.ERROR, "it broke"), Status.ERROR, "engine_error"),
        (Script([], FinishReason.SHED, "too late"), Status.SHED, "shed"),
        (say("abc"), Status.COMPLETED, "stop"),
    ],
)
async def test_how_it_ended_on_the_engine(script: Script, status: Status, reason: str) -> None:
    rig = Recorded(ScriptedEngine(script))
    await rig.a.post(CHAT, json=body())
    [line] = rig.lines
    assert (line.status, line.reason, line.turn) == (status, reason, 1)


async def test_who_leaves_is_told_as_cancelled_with_the_tokens_it_got() -> None:
    rig = Recorded(ScriptedEngine(say("abcdef", hold_at=4)))
    task = asyncio.create_task(rig.a.post(CHAT, json=body(stream=True)))
    await settled(lambda: rig.context.metrics.requests.of("a").tbt.count == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settled(lambda: rig.kept.lines)
    [line] = rig.lines
    assert (line.status, line.reason) == (Status.CANCELLED, "client_gone")
    assert (line.output_tokens, line.prefix_hit_tokens) == (4, None)


async def test_refused_before_a_worker_saw_it() -> None:
    limits = TenantsConfig(named={"b": TenantLimits(requests_per_minute=1)})
    rig = Recorded(tenants=limits)
    await rig.a.post(CHAT, json=body(temperature=99))
    await rig.a.post(CHAT, content=b"{")
    await rig.a.post("/v1/messages", json={"model": "tiny", "max_tokens": 0, "messages": []})
    for _ in range(2):
        await rig.b.post(CHAT, json=body())
    await rig.a.get("/v1/models/none")
    await rig.a.post("/tokenize", content=b"{")
    lines = rig.lines
    assert [(line.tenant, line.status, line.route) for line in lines] == [
        ("a", Status.REJECTED, CHAT),
        ("a", Status.REJECTED, CHAT),
        ("a", Status.REJECTED, "/v1/messages"),
        ("b", Status.COMPLETED, CHAT),
        ("b", Status.REJECTED, CHAT),
    ]
    assert lines[-1].reason == "rate_limit_exceeded"
    assert {line.turn for line in lines if line.status is Status.REJECTED} == {0}
    counts = await rig.counts()
    assert counts['agentserve_rejections_total{reason="rate_limit_exceeded"}'] == 1
    assert counts['agentserve_tenant_ended_total{status="rejected",tenant="b"}'] == 1


async def test_too_many_turns_and_no_worker_are_rejections() -> None:
    engine = ScriptedEngine()
    rig = Recorded(engine, tenants=TenantsConfig(named={"a": TenantLimits(concurrent_turns=1)}))
    await rig.a.post(CHAT, json=body(n=2))
    engine.alive = 0
    await rig.b.post(CHAT, json=body())
    assert [(line.tenant, line.status, line.reason) for line in rig.lines] == [
        ("a", Status.REJECTED, "over_limit"),
        ("a", Status.REJECTED, "over_limit"),
        ("b", Status.REJECTED, "no_worker"),
    ]


async def test_strangers_are_counted_and_have_no_line() -> None:
    rig = Recorded()
    for key in (None, "wrong"):
        await rig.client.post(CHAT, json=body(), headers=with_key(key))
    await rig.admin.post(CHAT, json=body())
    assert not rig.lines
    counts = await rig.counts()
    assert counts['agentserve_rejections_total{reason="invalid_api_key"}'] == 2
    assert counts['agentserve_rejections_total{reason="tenant_key_needed"}'] == 1
    assert not [name for name in counts if name.startswith("agentserve_tenant_ended")]


async def test_no_key_is_written_down_whatever_a_client_calls_its_request() -> None:
    rig = Recorded()
    await rig.b.post(CHAT, json=body(), headers={"x-request-id": A})
    assert [line.request for line in rig.lines] == ["(not shown)"]


async def test_an_arrival_is_when_the_whole_body_was_there() -> None:
    rig = Recorded()
    clock = rig.context.clock
    times: list[float] = []

    async def slowly() -> Any:
        yield b'{"model": "tiny", "messages": '
        times.append(clock.now())
        await asyncio.sleep(0)
        yield b'[{"role": "user", "content": "Hi"}]}'

    await rig.a.post(CHAT, content=slowly())
    [line] = rig.lines
    assert line.arrival_ts >= round(times[0], 6) - 1e-6


async def test_each_tenant_has_its_own_row_and_the_sum_is_what_was_recorded() -> None:
    rig = Recorded()
    for _ in range(3):
        await rig.a.post(CHAT, json=body())
    await rig.b.post(CHAT, json=body("something else"))
    counts = await rig.counts()
    for tenant, turns in (("a", 3), ("b", 1)):
        mine = [line for line in rig.lines if line.tenant == tenant]
        assert len(mine) == turns
        label = f'{{tenant="{tenant}"}}'
        assert counts[f"agentserve_tenant_ttft_seconds_count{label}"] == turns
        assert counts[f"agentserve_tenant_queue_seconds_count{label}"] == turns
        gaps = sum(line.output_tokens - 1 for line in mine)
        assert counts[f"agentserve_tenant_tbt_seconds_count{label}"] == gaps
        hits = sum(line.prefix_hit_tokens or 0 for line in mine)
        assert counts[f"agentserve_tenant_cached_tokens_total{label}"] == hits
    for caller in (rig.a, rig.b, rig.nobody):
        reply = await caller.get("/metrics")
        assert reply.status_code in (401, 403)
        assert "tenant" not in reply.text.replace("tenant_key", "").replace("a tenant", "").replace(
            "tenant's", ""
        )


async def test_what_was_told_is_on_disk_when_the_application_has_ended(tmp_path: Path) -> None:
    def opened() -> Opened:
        return Opened(at_ts=0.0, unix=0.0, model="m", policy="p")

    rig = Tenants(ScriptedEngine(), recording=LineWriter(tmp_path / "requests.jsonl", Bounds(), opened))
    async with rig.app.router.lifespan_context(rig.app):
        for _ in range(5):
            await rig.a.post(CHAT, json=body())
    assert len(read_records(tmp_path).requests) == 5


# --- one turn by hand ---------------------------------------------------------------------------


class Clock:
    at = 100.0

    def now(self) -> float:
        return self.at


def played(
    events: list[tuple[float, TurnEvent]], slo: Slo, done: FinishReason | BaseException, finished: float
) -> RequestRecord:
    """A turn that arrived at 100.0 and was submitted at 100.5."""
    clock, kept = Clock(), Lines()
    metrics = Metrics()
    log = RequestLog(metrics.requests, clock, policy="p", writer=kept)  # type: ignore[arg-type]
    course = log.begin(Origin({"request_id": "r", "route": "/r"}, clock.now), clock.now(), "a", SESSION, TURN)
    course.submit(Submit(SESSION, TURN, bytes(40), None, slo=slo), 100.5)  # type: ignore[arg-type]
    for at, event in events:
        match event:
            case StateChange():
                course.change(event)
            case TurnEnded():
                course.ended(event)
            case _:
                course.token(at)
    if isinstance(done, FinishReason):
        course.done(done, finished)
    else:
        course.failed(done, finished)
    log.over(course)
    [line] = kept.lines
    check(line)
    return line


def token(index: int) -> Token:
    return Token(SESSION, TURN, index, 7)


def usage(generated: int, admitted: float, first: float, ended: float) -> TurnEnded:
    told = TurnUsage(10, 4, generated, 8, 1, 100.5, admitted, first, ended, held={"gate": 3, "pages": 1})
    return TurnEnded(SESSION, TURN, FinishReason.STOP, told)


def test_times_are_those_that_happened() -> None:
    line = played(
        [
            (0, StateChange(SESSION, TURN, SessionState.WAITING, 100.6)),
            (0, StateChange(SESSION, TURN, SessionState.PREFILLING, 101.0)),
            (102.0, token(0)),
            (102.05, token(1)),
            (102.25, token(2)),
            (0, usage(3, 101.0, 101.9, 102.3)),
        ],
        Slo(),
        FinishReason.STOP,
        102.5,
    )
    assert (line.arrival_ts, line.submit_ts, line.admit_ts) == (100.0, 100.5, 101.0)
    assert line.every_token_ts == (2000.0, 50.0, 200.0)
    assert (line.first_token_ts, line.finish_ts) == (102.0, 102.5)
    assert (line.prefix_hit_tokens, line.computed_tokens, line.preemption_count) == (4, 8, 1)
    assert line.queue_reasons == {"gate": 3, "pages": 1}


def test_a_promise_is_kept_as_the_engine_says_and_by_nobody_who_has_no_answer() -> None:
    slo = Slo(ttft=2.0, tbt=0.1)
    events: list[tuple[float, TurnEvent]] = [
        (0.0, StateChange(SESSION, TURN, SessionState.PREFILLING, 101.0)),
        (102.0, token(0)),
        (102.05, token(1)),
    ]
    ended = usage(2, 101.0, 101.9, 102.3)
    for kept, missed, met in (
        (("ttft", "tbt"), (), True),
        (("ttft",), ("tbt",), False),
        ((), ("ttft",), False),
    ):
        told = msgspec.structs.replace(ended.usage, kept=kept, missed=missed)
        judged = [*events, (0.0, msgspec.structs.replace(ended, usage=told))]
        assert played(judged, slo, FinishReason.STOP, 102.5).slo_met is met
        assert played(judged, Slo(), FinishReason.STOP, 102.5).slo_met is None
    assert played(events, slo, RuntimeError("fault"), 102.5).slo_met is False
    assert played(events, slo, asyncio.CancelledError(), 102.5).slo_met is None


def test_who_left_before_it_was_over_has_what_was_known_by_then() -> None:
    events: list[tuple[float, TurnEvent]] = [
        (0, StateChange(SESSION, TURN, SessionState.PREFILLING, 101.0)),
        (0, StateChange(SESSION, TURN, SessionState.PREEMPTED, 101.2, "pages")),
        (0, StateChange(SESSION, TURN, SessionState.PREFILLING, 101.4)),
    ]
    line = played(events, Slo(), asyncio.CancelledError(), 103.0)
    assert (line.admit_ts, line.first_token_ts, line.preemption_count) == (101.0, None, 1)
    assert (line.status, line.prefix_hit_tokens, line.prompt_tokens) == (Status.CANCELLED, None, 10)


def test_times_of_a_long_reply_do_not_drift() -> None:
    gaps = [0.0123456 + i * 1e-7 for i in range(5000)]
    at, events = 100.7, []
    for index, gap in enumerate(gaps):
        at += gap
        events.append((at, token(index)))
    line = played([*events, (0, usage(5000, 100.6, 100.7, at))], Slo(), FinishReason.STOP, at)
    assert max(abs(told - (when)) for told, (when, _) in zip(line.token_times, events, strict=True)) < 2e-6


def test_labels_are_bounded_whatever_tenants_and_reasons_there_are() -> None:
    metrics = Metrics()
    for number in range(500):
        row = metrics.requests.of(f"t{number}")
        row.ttft.observe(number)
        row.ended["completed"] = row.ended.get("completed", 0) + 1
        metrics.requests.rejected(f"reason {number}")
    page = metrics.render().decode()
    rows = re.findall(
        r'^agentserve_tenant_ended_total\{status="completed",tenant="([^"]+)"', page, re.MULTILINE
    )
    assert len(rows) == 101
    assert 'agentserve_tenant_ttft_seconds_count{tenant="(others)"} 400.0' in page
    reasons = re.findall(r'^agentserve_rejections_total\{reason="([^"]+)"', page, re.MULTILINE)
    assert len(reasons) == 65
    assert reasons[-1] == OTHER


def test_buckets_count_what_is_up_to_their_bounds() -> None:
    metrics = Metrics()
    row = metrics.requests.of("a")
    for value in (0.05, 0.0500001, 1.0, 299.0, 301.0):
        row.ttft.observe(value)
    page = metrics.render().decode()

    def count(bound: str) -> float:
        found = re.search(rf'agentserve_tenant_ttft_seconds_bucket\{{le="{bound}",tenant="a"\}} (\S+)', page)
        assert found is not None
        return float(found.group(1))

    assert [count(bound) for bound in ("0.05", "0.1", "1.0", "300.0", r"\+Inf")] == [1, 2, 3, 4, 5]
    total = re.search(r'agentserve_tenant_ttft_seconds_sum\{tenant="a"\} (\S+)', page)
    assert total is not None
    assert float(total.group(1)) == pytest.approx(601.1000001)


def test_preemptions_are_told_by_why_and_way_and_never_fall() -> None:
    metrics = Metrics()
    one = PreemptionCounts(
        {"decode": {"swap": 3, "recompute": 1}}, swapped=7, returned=5, asked=2, migrated=1
    )
    two = PreemptionCounts({"decode": {"swap": 1}, "seat": {"migrate": 2}}, swapped=1)
    for counts in ([one, two], [two]):  # one of the workers says nothing
        metrics.requests.set_preemptions(counts)
    metrics.requests.worker_lost()
    page = metrics.render().decode()
    found = re.findall(r"^agentserve_(preemption_\w+_total{.*}) (\S+)$", page, re.MULTILINE)
    assert {name: float(value) for name, value in found} == {
        'preemption_reasons_total{reason="decode",way="swap"}': 4,
        'preemption_reasons_total{reason="decode",way="recompute"}': 1,
        'preemption_reasons_total{reason="seat",way="migrate"}': 2,
        'preemption_reasons_total{reason="worker_lost",way="recompute"}': 1,
        'preemption_blocks_total{what="swapped"}': 8,
        'preemption_blocks_total{what="returned"}': 5,
        'preemption_moves_total{what="asked"}': 2,
        'preemption_moves_total{what="migrated"}': 1,
    }
