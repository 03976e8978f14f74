"""Figures of the experiment, on examples that were worked out by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agentserve.sim.experiment.fairness import (
    fairness,
    jain,
    largest_gap,
    largest_work,
    late_entries,
    longest_overtaking,
    longest_wait,
    share_while_backlogged,
)
from agentserve.sim.experiment.metrics import even, figures, in_time, met, spread, tpot
from agentserve.sim.experiment.record import (
    IterationRecord,
    Pace,
    Promise,
    RequestRecord,
    Status,
    read_lines,
    write_lines,
)


def request(
    arrival: float,
    marks: tuple[float, ...] = (),
    status: Status = Status.OK,
    *,
    session: str = "s",
    tenant: str = "red",
    admit: float | None = None,
    slo: Promise = Promise(1.0, 0.2),  # noqa: B008
    prompt: int = 100,
    hit: int = 0,
) -> RequestRecord:
    return RequestRecord(
        session=session,
        turn=1,
        tenant=tenant,
        kind="chat",
        arrival_ts=arrival,
        admit_ts=admit,
        first_token_ts=marks[0] if marks else None,
        every_token_ts=marks,
        finish_ts=marks[-1] if marks else arrival,
        prompt_tokens=prompt,
        prefix_hit_tokens=hit,
        computed_tokens=prompt - hit,
        preemption_count=0,
        status=status,
        slo=slo,
    )


def iteration(
    served: tuple[float, ...], backlogged: str = "yy", active: str = "yy", at: float = 0.0
) -> IterationRecord:
    return IterationRecord(
        start_ts=at,
        iteration_ms=10.0,
        predicted_ms=10.0,
        host_ms=0.0,
        scheduled_tokens=1,
        prefill_tokens=0,
        rows=1,
        pages_used=1,
        pages_cached=0,
        pages_free=9,
        swapped_in=0,
        swapped_out=0,
        waiting=1,
        limits=(),
        served=served,
        backlogged=tuple(each == "y" for each in backlogged),
        active=tuple(each == "y" for each in active),
    )


def test_time_counts_from_the_arrival_that_was_meant() -> None:
    late = request(10.0, (12.5, 12.6))
    assert late.ttft == pytest.approx(2.5)
    assert late.gaps == pytest.approx((0.1,))


def test_tpot_is_the_time_after_the_first_token_per_token_after_it() -> None:
    assert tpot(request(0.0, (5.0, 5.1, 5.5, 5.6))) == pytest.approx(0.2)
    assert tpot(request(0.0, (5.0,))) is None


def test_percentiles_are_by_linear_interpolation() -> None:
    found = spread([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found is not None
    assert (found.p50, found.p95, found.p99) == pytest.approx((3.0, 4.8, 4.96))
    assert spread([]) is None


def test_a_promise_is_kept_if_first_token_and_gaps_are_in_time_and_it_ended_well() -> None:
    assert met(request(0.0, (1.0, 1.2)))
    assert not met(request(0.0, (1.01, 1.2)))
    assert not met(request(0.0, (1.0, 1.21)))
    assert not met(request(0.0, (1.0, 1.1), Status.TIMEOUT))
    assert not met(request(0.0, (), Status.REJECTED))
    gaps = [0.1] * 199 + [0.9]  # the 99th percentile of 200 gaps is below the longest
    marks = [1.0]
    for gap in gaps:
        marks.append(marks[-1] + gap)
    assert met(request(0.0, tuple(marks)))


def test_a_promise_of_deadlines_lets_who_was_early_pause() -> None:
    """1 s to the first token, then one each 0.2 s: due at 1.0, 1.2, 1.4, 1.6."""
    by_deadline = Promise(1.0, 0.2, Pace.DEADLINES)
    paused = request(0.0, (0.1, 0.2, 1.3, 1.6), slo=by_deadline)
    assert met(paused)
    assert met(paused) == in_time(paused)
    assert not even(paused)
    assert not met(request(0.0, (0.1, 0.2, 1.3, 1.61), slo=by_deadline))
    assert not met(request(0.0, (1.01, 1.02), slo=by_deadline))
    assert not met(request(0.0, (0.1,), Status.ABORTED, slo=by_deadline))
    found = figures([paused])
    assert (found.attainment, found.attainment_by_gaps, found.attainment_by_deadlines) == (1.0, 0.0, 1.0)


def test_goodput_counts_kept_promises_per_second_over_the_whole_span() -> None:
    """Five requests in ten seconds, of which two kept their promises."""
    found = figures(
        [
            request(0.0, (0.5, 0.6), hit=60),
            request(2.0, (2.5, 2.6)),
            request(3.0, (9.8, 10.0)),  # late
            request(4.0, (), Status.REJECTED),
            request(5.0, (), Status.OOM),
            request(6.0, (6.5,), Status.TIMEOUT),
            request(6.0, (), Status.ABORTED),
            request(7.0, (), Status.ERROR),
        ]
    )
    assert found.requests == 8
    assert found.seconds == pytest.approx(10.0)
    assert found.goodput == pytest.approx(0.2)
    assert found.attainment == pytest.approx(2 / 8)
    assert found.rejection_rate == found.oom_rate == pytest.approx(1 / 8)
    assert found.abandon_rate == pytest.approx(2 / 8)
    assert found.tokens_per_second == pytest.approx(0.6)
    assert found.hit_rate == pytest.approx(0.2)
    assert found.ttft is not None
    assert found.ttft.p50 == pytest.approx(0.5)
    assert found.tbt_p99 == pytest.approx(0.1 + 0.1 * 0.98)
    nothing = figures([])
    assert (nothing.ttft, nothing.tbt_p99, nothing.goodput) == (None, None, 0.0)


def test_high_throughput_is_no_comfort_to_one_stream() -> None:
    """The source text's own example: 2,000 tokens/s over 400 streams are 5 for each."""
    marks = tuple(1.0 + 0.2 * number for number in range(51))
    found = figures([request(1.0, marks, session=f"s{number}") for number in range(400)])
    assert found.tokens_per_second == pytest.approx(400 * 51 / 10)
    assert found.tpot is not None
    assert 1 / found.tpot.p50 == pytest.approx(5.0)


# --- fairness -----------------------------------------------------------------------------------


def test_jains_index_of_known_shares() -> None:
    assert jain([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([1.0, 2.0, 3.0]) == pytest.approx(36 / 42)
    assert jain([0.0, 0.0]) is None


def test_a_share_counts_only_while_its_tenant_is_backlogged() -> None:
    """Weights 1 and 3. In the first step red waits and gets 10 of 40: its due. In the second it gets nothing,
    but nothing of it waits. In the third blue is away, so red's due is all."""
    found = [
        iteration((10.0, 30.0)),
        iteration((0.0, 40.0), backlogged="ny"),
        iteration((20.0, 0.0), backlogged="yn", active="yn"),
    ]
    assert share_while_backlogged(found, 0, (1.0, 3.0)) == pytest.approx(1.0)
    assert share_while_backlogged(found, 1, (1.0, 3.0)) == pytest.approx(70 / 60)
    assert share_while_backlogged(found[1:2], 0, (1.0, 3.0)) is None


def test_short_backlogs_count_for_nothing_where_only_long_ones_are_asked_for() -> None:
    """Red waits for one step of 40, while blue's prompt ends, and later through three, of which it gets its
    half."""
    found = [
        iteration((0.0, 40.0), backlogged="yn"),
        iteration((0.0, 40.0), backlogged="nn"),
        *(iteration((20.0, 20.0)) for _ in range(3)),
    ]
    assert share_while_backlogged(found, 0, (1.0, 1.0)) == pytest.approx(60 / 80)
    assert share_while_backlogged(found, 0, (1.0, 1.0), sustained=60.0) == pytest.approx(1.0)
    assert share_while_backlogged(found, 0, (1.0, 1.0), sustained=60.1) is None
    assert fairness(found, ("red", "blue"), (1.0, 1.0), largest=5.0).shares["red"] == pytest.approx(1.0)
    assert largest_work([request(0.0, (1.0, 2.0), hit=40), request(0.0, (1.0,))]) == 102.0


def test_the_largest_gap_is_of_stretches_in_which_both_are_backlogged() -> None:
    """Weighted: +10, -20, +5 make a swing of 20; the step between stretches, in which blue does not wait,
    begins anew."""
    found = [
        iteration((10.0, 0.0)),
        iteration((0.0, 40.0)),
        iteration((5.0, 0.0)),
        iteration((100.0, 0.0), backlogged="yn"),
        iteration((0.0, 12.0)),
    ]
    assert largest_gap(found, (1.0, 2.0)) == pytest.approx(20.0)
    assert largest_gap(found[3:4], (1.0, 2.0)) is None


def test_fairness_of_a_run() -> None:
    found = fairness([iteration((10.0, 20.0)), iteration((10.0, 20.0))], ("red", "blue"), (1.0, 2.0))
    assert found.jain == pytest.approx(1.0)
    assert found.least_share == pytest.approx(1.0)
    alone = fairness([iteration((5.0, 0.0), "nn")], ("red", "blue"), (1.0, 1.0))
    assert (alone.jain, alone.largest_gap, alone.least_share) == (None, None, None)


def test_waiting_and_overtaking() -> None:
    """b came 3 s after a and was admitted before it; c is another tenant's; d was never admitted."""
    found = [
        request(0.0, (9.0,), session="a", admit=8.0),
        request(3.0, (5.0,), session="b", admit=4.0),
        request(7.0, (7.5,), session="c", admit=7.2, tenant="blue"),
        msgspec.structs.replace(request(6.0, (), Status.ABORTED, session="d"), finish_ts=20.0),
    ]
    assert longest_overtaking(found) == pytest.approx(3.0)
    assert longest_wait(found, 30.0) == pytest.approx(14.0)
    assert longest_overtaking(found[:1]) == 0.0


def test_a_late_turn_that_others_pass_for_ever_breaks_the_bound() -> None:
    """a is promised its first token within 1 s. b was there before it and c came within that second: with
    `every` 2 it may be passed by 2 x (2 + 1) turns once it is late, and is by 9."""
    line = [request(float(at), (at + 3.0,), session=f"l{at}", admit=at + 0.1) for at in range(3, 12)]
    before = request(-1.0, (2.9,), session="b", admit=2.0)
    after = request(0.5, (2.9,), session="c", admit=2.5)
    mine = request(0.0, (30.0,), session="a", admit=20.0)
    found = [before, after, mine, *line]
    assert late_entries(found, 2) == pytest.approx((2 + 9) / (2 * 3))
    soon = msgspec.structs.replace(mine, admit_ts=2.7)
    assert late_entries([before, after, soon, *line], 2) == pytest.approx(2 / 6)
    in_time = msgspec.structs.replace(mine, admit_ts=0.9)
    assert late_entries([in_time], 2) == 0.0


def test_records_come_back_from_json_lines_as_they_were(tmp_path: Path) -> None:
    lines = [request(0.0, (0.5, 0.6), admit=0.1), request(2.0, (), Status.REJECTED)]
    write_lines(lines, tmp_path / "logs" / "r.jsonl")
    assert read_lines(tmp_path / "logs" / "r.jsonl", RequestRecord) == lines
    steps = [iteration((1.0, 2.0))]
    write_lines(steps, tmp_path / "i.jsonl")
    assert read_lines(tmp_path / "i.jsonl", IterationRecord) == steps
    names = set(msgspec.json.decode((tmp_path / "logs" / "r.jsonl").read_bytes().splitlines()[0]))
    asked = {
        *("arrival_ts", "admit_ts", "first_token_ts", "every_token_ts", "finish_ts", "prefix_hit_tokens"),
        *("preemption_count", "tenant", "status"),
    }
    assert asked <= names
