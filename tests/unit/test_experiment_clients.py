"""Clients of the experiment: when they ask, what they count, and how a run records them."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from agentserve.messages import Abort, Close, Park, Submit, unpack_tokens
from agentserve.sim.experiment.clients import Clients, Load
from agentserve.sim.experiment.engines import Entrant, SloRule, build_core, entrant_named, promises
from agentserve.sim.experiment.machine import ImaginedMachine
from agentserve.sim.experiment.record import Promise, Status
from agentserve.sim.experiment.run import Recorded, Run
from agentserve.sim.experiment.script import Session, Trace, Turn, arrivals
from agentserve.sim.experiment.synthetic import Lengths, draw
from agentserve.sim.hardware import Hardware, hardware_named
from agentserve.sim.traces.agents import Run as Text
from agentserve.types import Slo

TINY = msgspec.structs.replace(
    hardware_named("tiny"), device_kv=4_000_000, per_token=2e-4, max_batched_tokens=64
)
LENGTHS = Lengths(
    shared_prefix=16,
    own_prefix=80,
    agent_turns=3,
    agent_append=16,
    agent_output=4,
    chat_prompt=40,
    chat_output=4,
)
PLAIN = Entrant("plain", "chunked")


def promise(context: int, turn: Turn) -> Promise:
    return Promise(1.0, 0.5)


def one(*turns: Turn, arrives: float = 0.0, tenant: str = "all") -> Session:
    return Session(f"s{arrives:g}", tenant, arrives, turns, "test")


def asks(tokens: int, output: int = 4, wait: float = 0.0) -> Turn:
    return Turn((Text(tokens, tokens),), output, wait)


def trace_of(*sessions: Session, weights: dict[str, float] | None = None) -> Trace:
    return Trace("test", sessions, weights or {"all": 1.0})


def play(trace: Trace, load: Load, hardware: Hardware = TINY, entrant: Entrant = PLAIN) -> Recorded:
    core = build_core(hardware, entrant, trace.weights, 400)
    clients = Clients(trace, load, promise, 1000)
    machine = ImaginedMachine(hardware, 1000)
    found = Run(core, machine, clients, tenants=tuple(trace.weights), block_bytes=hardware.block_bytes).run()
    core.check()
    return found


# --- clients ------------------------------------------------------------------------------------


def test_commands_come_at_their_times_and_hold_the_whole_context() -> None:
    trace = trace_of(one(asks(20)), one(asks(30), arrives=2.0))
    clients = Clients(trace, Load(4.0), promise, 1000)
    assert clients.next_due() == 0.0
    (first,) = clients.due(0.1)
    assert isinstance(first, Submit)
    assert len(unpack_tokens(first.tokens)) == 20
    assert (first.tenant, first.slo) == ("all", Slo(ttft=1.0, gap=0.5))
    assert clients.next_due() == pytest.approx(0.5)
    assert clients.due(0.4) == []
    assert len(clients.due(0.6)) == 1


def test_a_cap_keeps_requests_before_the_server_and_their_time_runs() -> None:
    trace = trace_of(*(one(asks(40, 20), arrives=at) for at in (0.0, 0.1, 0.2)))
    free, capped = play(trace, Load(1.0)), play(trace, Load(1.0, cap=1))
    waits = [record.admit_ts - record.arrival_ts for record in capped.requests if record.admit_ts is not None]
    assert [record.arrival_ts for record in capped.requests] == pytest.approx([0.0, 0.1, 0.2])
    assert max(each.waiting + each.rows for each in capped.iterations) == 1
    assert waits == sorted(waits)
    assert waits[2] > waits[1] > 0.01
    assert max(each.rows for each in free.iterations) > 1


def test_the_next_turn_follows_the_end_of_the_one_before_and_its_wait() -> None:
    found = play(trace_of(one(asks(40, 4, 1.5), asks(20, 4, 0.25), asks(20))), Load(1.0))
    first, second, third = found.requests
    assert first.finish_ts is not None
    assert second.finish_ts is not None
    assert second.arrival_ts == pytest.approx(first.finish_ts + 1.5)
    assert third.arrival_ts == pytest.approx(second.finish_ts + 0.25)
    assert [each.prompt_tokens for each in found.requests] == [40, 64, 88]
    assert second.prefix_hit_tokens == 43  # all that had KV: the last token written has none


def test_nobody_comes_later_because_the_server_is_slow() -> None:
    """Time counts from the intended arrival, also of what arrives while a step runs (no coordinated
    omission): a machine ten times as slow sees the same arrivals."""
    trace = draw("chat", 20, lengths=LENGTHS)
    slow = msgspec.structs.replace(TINY, fixed=10 * TINY.fixed, per_token=10 * TINY.per_token)
    for hardware in (TINY, slow):
        found = play(trace, Load(20.0), hardware)
        meant = dict(zip((s.name for s in trace.sessions), arrivals(trace, 20.0), strict=True))
        assert {each.session: each.arrival_ts for each in found.requests} == pytest.approx(meant)
        assert all(each.first_token_ts > each.arrival_ts for each in found.requests if each.first_token_ts)


def test_what_can_never_fit_is_counted_and_what_its_session_would_have_asked_too() -> None:
    small = msgspec.structs.replace(TINY, device_kv=100_000)
    found = play(trace_of(one(asks(200, 4, 0.0), asks(10), asks(10))), Load(1.0), small)
    assert [each.status for each in found.requests] == [Status.OOM, Status.ABORTED, Status.ABORTED]
    assert "KV pool" in found.requests[0].why


def test_a_client_without_patience_left_gives_its_request_up() -> None:
    trace = trace_of(one(asks(40, 200)), one(asks(40, 4), arrives=0.0001), one(asks(40, 4), arrives=5.0))
    found = play(trace, Load(1.0, cap=1, patience=0.5))
    by_name = {each.session: each for each in found.requests}
    assert by_name["s0"].status is Status.TIMEOUT  # at the server
    assert by_name["s0.0001"].status is Status.TIMEOUT  # before it
    assert by_name["s0.0001"].admit_ts is None
    assert by_name["s5"].status is Status.OK
    assert by_name["s0"].finish_ts == pytest.approx(0.5, abs=0.05)


def test_ends_are_said_to_the_server() -> None:
    trace = trace_of(one(asks(40, 200)))
    clients = Clients(trace, Load(1.0, patience=0.5), promise, 1000)
    clients.due(0.0)
    (gives_up,) = clients.due(0.6)
    assert isinstance(gives_up, Abort)
    core = build_core(TINY, PLAIN, trace.weights, 400)
    heard: list[object] = []
    machine = ImaginedMachine(TINY, 1000)
    playing = Clients(
        trace_of(one(asks(9, 2), asks(9, 2)), one(asks(9, 2), arrives=0.3)), Load(1.0), promise, 99
    )
    due = playing.due

    def listened(now: float) -> list[object]:
        heard.extend(commands := due(now))
        return list(commands)

    playing.due = listened  # type: ignore[method-assign,assignment]
    Run(core, machine, playing, tenants=("all",), block_bytes=TINY.block_bytes).run()
    ends = [(type(each).__name__, each.session) for each in heard if isinstance(each, (Park, Close))]
    assert ends == [("Park", "s0"), ("Close", "s0"), ("Park", "s0.3")]


def test_the_warm_up_does_not_count() -> None:
    trace = draw("chat", 20, lengths=LENGTHS)
    clients = Clients(trace, Load(1.0), promise, 1000, warm_up=0.1)
    assert clients.total == 18
    assert clients.counted == {session.name for session in trace.sessions[2:]}


# --- a run --------------------------------------------------------------------------------------


def test_a_run_records_every_token_and_every_step() -> None:
    trace = draw("agents", 6, lengths=LENGTHS)
    found = play(trace, Load(2.0))
    assert len(found.requests) == trace.requests
    assert {each.status for each in found.requests} == {Status.OK}
    for each in found.requests:
        marks = each.every_token_ts
        assert len(marks) == 4
        assert each.arrival_ts <= _set(each.admit_ts) < marks[0] == each.first_token_ts
        assert all(earlier < later for earlier, later in pairwise(marks))
        assert marks[-1] == each.finish_ts
    assert sum(each.computed_tokens for each in found.requests) == sum(
        each.scheduled_tokens for each in found.iterations
    )
    work = sum(sum(each.served) for each in found.iterations)
    read = sum(each.prefill_tokens for each in found.iterations)
    assert work == read + 2 * sum(len(each.every_token_ts) for each in found.requests)
    for each in found.iterations:
        assert each.pages_used + each.pages_cached + each.pages_free == TINY.pages
        assert all(
            active or not backlogged for active, backlogged in zip(each.active, each.backlogged, strict=True)
        )
    assert found.iterations[-1].waiting == 0


def test_the_same_run_twice_is_the_same() -> None:
    trace = draw("mix", 12, lengths=LENGTHS, scale=1.0)
    trace = msgspec.structs.replace(trace, sessions=tuple(s for s in trace.sessions if s.kind != "long"))
    one_run, other = play(trace, Load(5.0)), play(trace, Load(5.0))
    assert one_run.requests == other.requests
    assert one_run.iterations == other.iterations


@pytest.mark.parametrize(
    "name", ["fcfs", "decode-first", "chunked", "prefix-aware", "ours-no-tiers", "ours", "no-cache"]
)
def test_every_policy_of_the_ladder_serves_the_same_tokens(name: str) -> None:
    hardware = msgspec.structs.replace(TINY, device_kv=500_000)
    trace = draw("agents", 8, lengths=LENGTHS)
    found = play(trace, Load(20.0), hardware, entrant_named(name))
    assert {each.status for each in found.requests} == {Status.OK}
    hits = sum(each.prefix_hit_tokens for each in found.requests)
    assert (hits == 0) == (name == "no-cache")
    assert any(each.swapped_out for each in found.iterations) == (name == "ours")


def test_the_host_s_time_is_seen_where_a_plan_takes_some() -> None:
    trace = draw("chat", 10, lengths=LENGTHS)
    core = build_core(TINY, PLAIN, trace.weights, 400)
    clients = Clients(trace, Load(50.0), promise, 1000)
    machine = ImaginedMachine(TINY, 1000, host=0.002)
    found = Run(core, machine, clients, tenants=tuple(trace.weights), block_bytes=TINY.block_bytes).run()
    assert {round(each.host_ms, 6) for each in found.iterations} == {2.0}


def test_promises_come_from_an_idle_machine() -> None:
    made = promises(TINY, SloRule(times=5.0, least_ttft=0.001))(100, asks(50, 10))
    assert made.ttft == pytest.approx(5 * TINY.step([(100, 50)]))
    assert made.tbt == pytest.approx(5 * TINY.step([(160, 1)]))
    assert promises(TINY, SloRule())(0, asks(5)).ttft == 1.0
    assert promises(TINY, SloRule(ttft=3.0, tbt=0.1))(0, asks(5)) == Promise(3.0, 0.1)


def test_entrants_by_name() -> None:
    assert entrant_named("chunked@512") == Entrant("chunked@512", "chunked", tokens=512)
    assert entrant_named("programs+tiers") == Entrant("programs+tiers", "programs", tiers=True)
    for name in ("best", "chunked@x", "chunked@0", "chunked+gold"):
        with pytest.raises(ValueError, match=r"policy|tokens") as caught:
            entrant_named(name)
        assert "\n" not in str(caught.value)


def _set(value: float | None) -> float:
    assert value is not None
    return value
