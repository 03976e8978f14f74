"""Late turns stand behind those that can be in time, within their tenant, and starve by nobody."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.scheduling.orders import Keyed, promised
from agentserve.core.scheduling.relegation import EVERY, Relegating
from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.core.timekeeper import RELEGATED
from agentserve.types import NO_SLO, Slo
from tests.engines import cold
from tests.promises_rig import COST, PromisesRig
from tests.turns import waiting

LONG = 60  # tokens: a step of 64
SLOW = COST.step([(0, LONG)])


def test_who_is_late_goes_behind_and_in_between() -> None:
    order = Relegating(Keyed)
    turns = [waiting(f"t{number}", relegated=number < 3) for number in range(9)]
    for turn in turns:
        order.entered(turn, 0.0)
    assert [turn.id for turn in order.line(0.0)] == ["t3", "t4", "t5", "t0", "t6", "t7", "t8", "t1", "t2"]
    for name in ("t3", "t4", "t5"):
        order.left(next(turn for turn in turns if turn.id == name), 0.0)
    assert next(order.line(0.0)).id == "t0"


@given(
    st.lists(
        st.sampled_from(["comes", "comes late", "is late", "leaves", "leaves", "is aborted"]), max_size=120
    )
)
def test_a_late_turn_waits_for_a_bounded_number_of_others(happenings: list[str]) -> None:
    """With n late turns before it, it enters after at most EVERY x (n + 1) others have. Who is aborted in
    line has passed nobody."""
    order, numbers = Relegating(Keyed), count()
    line: list = []
    bounds: dict[str, int] = {}  # of late turns: how many may still leave before it

    def left(session, *, enters: bool) -> None:  # type: ignore[no-untyped-def]
        order.left(session, 0.0)
        line.remove(session)
        bounds.pop(session.id, None)
        for name, left_over in bounds.items() if enters else ():
            assert left_over > 0, f"{name} was passed by more than it may be"
            bounds[name] = left_over - 1

    def is_late(session) -> None:  # type: ignore[no-untyped-def]
        bounds[session.id] = EVERY * (len(bounds) + 1)
        session.running_turn.relegated = True
        order.entered(session, float(next(numbers)))

    for happening in happenings:
        hopeful = [session for session in line if not session.running_turn.relegated]
        if happening.startswith("comes"):
            session = waiting(f"t{next(numbers)}")
            line.append(session)
            if happening == "comes":
                order.entered(session, 0.0)
            else:
                is_late(session)
        elif happening == "is late" and hopeful:
            order.left(hopeful[0], 0.0)
            is_late(hopeful[0])
        elif happening == "leaves" and line:
            left(next(order.line(0.0)), enters=True)
        elif happening == "is aborted" and line:
            left(line[-1], enters=False)
        assert {session.id for session in order.line(0.0)} == {session.id for session in line}
        assert len(order) == len(line)


def test_turns_that_can_be_in_time_are_in_time_where_all_would_be_late() -> None:
    """Twice as many turns as the machine can serve: as they came, all but the first few would be late."""

    def play(policy: str) -> PromisesRig:
        rig = PromisesRig((64,), max_num_seqs=2, scheduling=SchedulingConfig(policy=policy))
        arrivals = [(number, 1.0 + number * SLOW / 2) for number in range(40)]
        while arrivals or rig.core.has_work:
            while arrivals and arrivals[0][1] <= rig.now:
                number, _ = arrivals.pop(0)
                rig.submit(f"s{number}", [number] * LONG, max_tokens=1, slo=Slo(ttft=4 * SLOW))
            if rig.step() is None:
                rig.now = max(rig.now, arrivals[0][1]) if arrivals else rig.now
        return rig

    kept = {
        policy: sum("ttft" in end.usage.kept for end in play(policy).all_ended())
        for policy in ("chunked", "fair-resumes")
    }
    assert kept["chunked"] <= 10
    assert kept["fair-resumes"] >= 13, kept
    rig = play("fair-resumes")
    late = [end for end in rig.all_ended() if end.usage.relegated]
    assert late
    assert rig.core.view().promises.relegated == len(late)


@pytest.mark.parametrize("policy", ["fair-resumes", "deadline"])
def test_under_sustained_overload_every_late_turn_enters_within_its_bound(policy: str) -> None:
    """Three times what can be served, for as long as it takes: who is late is passed by a bounded number."""
    rig = PromisesRig((64,), max_num_seqs=2, scheduling=SchedulingConfig(policy=policy))
    bounds: dict[str, int] = {}  # of late turns that wait: how many may still enter before them
    done: set[str] = set()
    arrived = count()
    due = 1.0
    while len(done) < 40:
        while due <= rig.now:
            rig.submit(f"s{next(arrived)}", [1] * LONG, max_tokens=1, slo=Slo(ttft=4 * SLOW))
            rig.core.kv.evict_all()  # no prompt finds another's KV
            due += SLOW / 3
        before = set(rig.entered())
        rig.step()
        entered = [name for name in rig.entered() if name not in before]
        for name in entered:
            if bounds.pop(name, None) is not None:
                done.add(name)
            for other, left in bounds.items():
                assert left > 0, f"{other} was passed by more than it may be"
                bounds[other] = left - 1
        late = [s for s in rig.core.scheduler.waiting if s.running_turn.relegated and s.id not in bounds]
        for session in late:
            bounds[session.id] = EVERY * (len(bounds) + 1)


def test_all_that_are_late_are_found_however_many_they_are() -> None:
    """No seat becomes free meanwhile, and nobody comes or goes."""
    rig = PromisesRig((400,), max_num_seqs=1)
    rig.submit("runs", [9] * 4, max_tokens=500)
    rig.step()
    late = 3 * RELEGATED
    for number in range(late):
        rig.submit(f"s{number}", [number] * LONG, max_tokens=1, slo=Slo(ttft=1e-6))
    for _ in range(8):
        rig.step()
    assert rig.core.view().promises.relegated == late


def test_a_tenants_late_turns_cost_another_nothing() -> None:
    """Relegation moves turns within their tenant: the other's enter where they would have."""
    places = []
    for slo in (NO_SLO, Slo(ttft=1e-6)):
        rig = PromisesRig((64,), max_num_seqs=1)
        for number in range(8):
            rig.submit(f"a{number}", [number] * LONG, max_tokens=1, tenant="a", slo=slo)
            rig.submit(f"b{number}", [100 + number] * LONG, max_tokens=1, tenant="b")
        rig.drain()
        places.append([name for name in rig.entered() if name.startswith("b")])
        order = rig.entered()
        assert [order.index(f"b{number}") for number in range(8)] == sorted(
            order.index(f"b{number}") for number in range(8)
        )
        for number in range(8):
            assert rig.output(f"a{number}") == cold([number] * LONG, 1)
    assert places[0] == places[1]


def test_who_was_promised_less_time_goes_first_for_a_minute() -> None:
    first, urgent = waiting("first"), waiting("urgent", arrived=2.0, slo=Slo(ttft=1.0))
    lax = waiting("lax", slo=Slo(ttft=1e300))
    much_later = waiting("much later", arrived=61.0, slo=Slo(ttft=1e-6))
    order = Keyed(promised)
    for turn in (lax, first, much_later, urgent):
        order.entered(turn, 0.0)
    assert [turn.id for turn in order.line(0.0)] == ["urgent", "first", "lax", "much later"]


def test_a_preempted_turn_that_is_late_already_keeps_its_place() -> None:
    """Its first token was in time: nothing is won by setting it back."""
    rig = PromisesRig((16,), max_num_seqs=4)
    rig.submit("a", [1] * 20, max_tokens=30, slo=Slo(ttft=1.0))
    rig.submit("b", [2] * 20, max_tokens=30, slo=Slo(ttft=1.0))
    rig.drain()
    assert sum(rig.ended(name).usage.preemptions for name in "ab")
    assert not any(rig.ended(name).usage.relegated for name in "ab")
    assert all(rig.ended(name).usage.kept == ("ttft",) for name in "ab")
