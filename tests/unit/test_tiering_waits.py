"""Waits: curves that have closed forms, and estimates that count those who still wait."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.survival import (
    EDGES,
    HORIZON,
    IDLE_PRIOR,
    TOOL_PRIOR,
    Curve,
    PointWait,
    around,
    longest,
    mixture,
    through,
)
from tiering.waits import IDLE, WaitCurves, WaitSettings, name_of

TIMES = st.one_of(st.floats(0, 1e7), st.floats(0, 10), st.sampled_from([0.0, 1e-3, HORIZON, 1e300]))
CURVES = st.one_of(
    st.sampled_from([TOOL_PRIOR, IDLE_PRIOR]),
    st.floats(1e-3, 1e6).map(around),
    st.lists(st.floats(0, 1), min_size=len(EDGES), max_size=len(EDGES)).map(
        lambda values: Curve(sorted(values, reverse=True))
    ),
)


def test_the_tool_prior_has_the_published_quantiles() -> None:
    for q, seconds in ((0.5, 1.10), (0.9, 2.03), (0.99, 19.98), (0.9995, 83.6)):
        assert TOOL_PRIOR.quantile(q) == pytest.approx(seconds, rel=0.05)


def test_an_exponential_wait_has_its_closed_forms() -> None:
    curve = Curve([math.exp(-t / 5.0) for t in EDGES])
    assert curve.survival(3.0) == pytest.approx(math.exp(-0.6), rel=1e-6)
    assert curve.conditional(2.0, 0.01) / 0.01 == pytest.approx(0.2, rel=1e-2)
    assert curve.conditional(4.0, 5.0) == pytest.approx(1 - math.exp(-1), rel=1e-6)
    assert curve.expected_hold(7.0, 5.0) == pytest.approx(5 * (1 - math.exp(-1)), rel=1e-6)
    assert curve.quantile(0.5) == pytest.approx(5 * math.log(2), rel=1e-6)


@settings(deadline=None)
@given(CURVES, TIMES, TIMES, TIMES)
def test_a_curve_is_a_survival_function(curve: Curve, t: float, dt: float, more: float) -> None:
    assert 0 < curve.survival(t + dt) <= curve.survival(t) <= 1
    assert 0 <= curve.conditional(t, dt) <= 1
    assert curve.conditional(t, dt) <= curve.conditional(t, dt + more) + 1e-9
    held = curve.expected_hold(t, dt)
    assert 0 <= held <= dt
    assert held <= curve.expected_hold(t, dt + more) * (1 + 1e-6) + 1e-6


@settings(deadline=None)
@given(CURVES, st.floats(0, 1))
def test_a_quantile_is_where_that_share_has_come_back(curve: Curve, q: float) -> None:
    t = curve.quantile(q)
    assert 0 <= t <= HORIZON
    assert t == HORIZON or 1 - curve.survival(t * (1 + 1e-9) + 1e-12) >= q - 1e-6


@pytest.mark.parametrize("bad", [math.nan, -1.0, -math.inf, math.inf, 1e308])
def test_bad_times_are_harmless(bad: float) -> None:
    for wait in (TOOL_PRIOR, PointWait(3.0), PointWait(bad)):
        for value in (wait.survival(bad), wait.conditional(bad, bad), wait.conditional(1.0, bad)):
            assert 0 <= value <= 1
        assert math.isfinite(wait.expected_hold(bad, bad))
        assert math.isfinite(wait.quantile(0.5))
    assert 0 <= TOOL_PRIOR.quantile(bad) <= HORIZON


def test_waiting_for_two_is_waiting_for_the_later() -> None:
    both = longest([around(1.0), around(100.0)])
    assert both.quantile(0.5) == pytest.approx(100.0, rel=0.05)
    edge = EDGES[50]
    one = TOOL_PRIOR.survival(edge)
    assert longest([TOOL_PRIOR, TOOL_PRIOR]).survival(edge) == pytest.approx(1 - (1 - one) ** 2)


def test_a_mixture_becomes_what_has_not_been_ruled_out() -> None:
    mixed = mixture([(1.0, around(1.0)), (1.0, around(1000.0))])
    assert mixed.survival(50.0) == pytest.approx(0.5, abs=0.01)
    assert mixed.conditional(50.0, 50.0) < 0.01  # it is the slow kind then
    with pytest.raises(ValueError, match="positive"):
        mixture([(0.0, TOOL_PRIOR)])


def test_a_known_wait() -> None:
    wait = PointWait(5.0)
    assert (wait.survival(4.9), wait.survival(5.0)) == (1.0, 0.0)
    assert (wait.conditional(3.0, 1.9), wait.conditional(3.0, 2.0)) == (0.0, 1.0)
    assert wait.expected_hold(3.0, 10.0) == 2.0
    assert wait.quantile(0.5) == 5.0


def test_points_of_a_curve_are_met() -> None:
    curve = through(((1.0, 0.5), (10.0, 0.1), (HORIZON, 0.01)))
    assert curve.survival(1.0) == pytest.approx(0.5, rel=0.02)
    assert curve.survival(10.0) == pytest.approx(0.1, rel=0.02)


# --- learning ------------------------------------------------------------------------------------


def test_an_unknown_tool_has_the_prior() -> None:
    waits = WaitCurves()
    assert waits.curve(("never seen",), 0.0).values == pytest.approx(TOOL_PRIOR.values, rel=1e-9)
    assert waits.curve((), 0.0).values == pytest.approx(IDLE_PRIOR.values, rel=1e-9)


def test_a_tool_is_learned_and_others_learn_from_it_a_little() -> None:
    waits, random_ = WaitCurves(), random.Random(7)
    for i in range(300):
        waits.started(f"s{i}", ("build",), 0.0)
        waits.came(f"s{i}", random_.expovariate(1 / 60.0))
    own = waits.curve(("build",), 0.0)
    assert own.quantile(0.5) == pytest.approx(60 * math.log(2), rel=0.25)
    assert waits.curve(("new",), 0.0).quantile(0.5) > 5 * TOOL_PRIOR.quantile(0.5)
    assert waits.curve((), 0.0).quantile(0.5) == pytest.approx(IDLE_PRIOR.quantile(0.5))
    assert list(waits.names()) == ["build"]


def test_the_product_limit_by_hand() -> None:
    """Waits 1, 2, 2+, 3, 5+ (+: given up). S(1) = 4/5, S(2) = 3/5, S(3) = 3/10 (Kaplan and Meier).

    Given up within the bin of 2 counts half there: S(2) = 4/5 x (1 - 1/3.5).
    """
    waits = WaitCurves(WaitSettings(prior_weight=1e-9, memory=1e9))
    for name, waited, came in (
        ("a", 1, True),
        ("b", 2, True),
        ("c", 2, False),
        ("d", 3, True),
        ("e", 5, False),
    ):
        waits.started(name, ("t",), 0.0)
        if came:
            waits.came(name, waited)
        else:
            waits.lost(name, float(waited))
    curve = waits.curve(("t",), 0.0)
    assert curve.survival(1.2) == pytest.approx(4 / 5, rel=1e-6)
    assert curve.survival(2.4) == pytest.approx(4 / 5 * 5 / 7, rel=1e-6)
    assert curve.survival(4.0) == pytest.approx(4 / 5 * 5 / 7 / 2, rel=1e-6)


def test_who_still_waits_counts() -> None:
    """20 came back at once, 20 have waited 100 s so far: half of all waits are longer than that."""
    waits = WaitCurves()
    for i in range(40):
        waits.started(f"s{i}", ("t",), 0.0)
        if i < 20:
            waits.came(f"s{i}", 0.5)
    assert waits.waiting == 20
    assert waits.curve(("t",), 100.0).survival(50.0) > 0.4


def test_waits_that_were_given_up_make_a_tool_slower_not_faster() -> None:
    with_lost, without = WaitCurves(), WaitCurves()
    for waits in (with_lost, without):
        for i in range(50):
            waits.started(f"s{i}", ("t",), 0.0)
            waits.came(f"s{i}", 1.0)
    for i in range(50):
        with_lost.started(f"l{i}", ("t",), 0.0)
        with_lost.lost(f"l{i}", 10.0)
    assert with_lost.curve(("t",), 0.0).survival(5.0) > 10 * without.curve(("t",), 0.0).survival(5.0)


def test_a_tool_that_changed_is_learned_anew() -> None:
    waits = WaitCurves(WaitSettings(memory=64))
    for i in range(600):
        waits.started("s", ("t",), 0.0)
        waits.came("s", 1.0 if i < 300 else 50.0)
    assert waits.curve(("t",), 0.0).quantile(0.5) == pytest.approx(50.0, rel=0.2)


def test_several_tools_at_once_are_learned_together_from_the_sum_of_what_is_known() -> None:
    waits = WaitCurves()
    for i in range(200):
        waits.started(f"s{i}", ("slow",), 0.0)
        waits.came(f"s{i}", 40.0)
    both = waits.curve(("slow", "fast", "slow"), 0.0)
    assert both.quantile(0.5) == pytest.approx(40.0, rel=0.2)
    assert name_of(("b", "a", "b")) == name_of(("a", "b")) == "a + b"
    assert name_of(()) == IDLE


def test_names_and_their_lengths_are_bounded() -> None:
    waits = WaitCurves(WaitSettings(max_names=8))
    for i in range(100):
        waits.started("s", (f"{i}" + "x" * 100_000,), 0.0)
        waits.came("s", 1.0)
    assert len(list(waits.names())) == 8
    assert max(map(len, waits.names())) == 128


def test_calibration_of_good_and_bad_predictions() -> None:
    waits, random_ = WaitCurves(), random.Random(3)
    for i in range(2000):
        waits.started(f"s{i}", ("t",), float(i))
        waits.came(f"s{i}", random_.lognormvariate(0.0, 1.0))
    ended, by_median, by_p90 = waits.predicted["t"]
    assert ended == 2000
    assert by_median / ended == pytest.approx(0.5, abs=0.05)
    assert by_p90 / ended == pytest.approx(0.9, abs=0.04)


def test_what_came_of_predictions_is_counted_on_when_what_was_learned_has_made_room() -> None:
    waits = WaitCurves(WaitSettings(max_names=2))
    for name in ("t", "u", "v", "t"):
        waits.started("s", (name,), 0.0)
        waits.came("s", 1.0)
    assert waits.predicted["t"][0] == 2


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["came", "lost", "start"]), st.floats()),
        max_size=40,
    )
)
def test_no_input_breaks_the_curves(events: list[tuple[str, str, float]]) -> None:
    waits = WaitCurves()
    for session, event, value in events:
        if event == "start":
            waits.started(session, ("t",), value)
        elif event == "came":
            waits.came(session, value)
        else:
            waits.lost(session, value)
        assert 0 < waits.curve(("t",), value).survival(1.0) <= 1


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="prior weight"):
        WaitCurves(WaitSettings(prior_weight=0.0))


def test_operators_are_told_how_good_predictions_were() -> None:
    curves = WaitCurves(WaitSettings(max_names=2))
    expected = [0, 0, 0]
    for number, waited in enumerate((0.01, 1.2, 1.9, 50.0)):
        curves.started(f"s{number}", ("grep",), 0.0)
        median, p90 = (curves.curve(("grep",), 0.0).quantile(q) for q in (0.5, 0.9))
        expected = [expected[0] + 1, expected[1] + (waited <= median), expected[2] + (waited <= p90)]
        curves.came(f"s{number}", waited)
    curves.started("lost", ("grep",), 0.0)
    curves.lost("lost", 5.0)
    assert curves.predicted == {"grep": tuple(expected)}
    assert 0 < expected[1] < expected[2] < 4, "the waits tell median, P90 and all apart"
    for number in range(20):  # names are bounded
        curves.started("s", (f"tool{number}",), 0.0)
        curves.came("s", 1.0)
    assert len(curves.predicted) == 3
