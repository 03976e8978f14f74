"""When a failed delivery is tried again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools_bridge.webhooks.schedule import HOUR, LIFECYCLE, TOOL, next_attempt, retry_after_seconds


def half():
    return 0.5


def attempts(schedule, draw=half, **more):
    """Moments of all attempts, each failing at once."""
    moments, now = [0.0], 0.0
    while (at := next_attempt(schedule, len(moments), 0.0, now, draw, **more)) is not None:
        moments.append(at)
        now = at
    return moments


def test_a_tool_call_is_tried_soon_and_until_its_deadline():
    assert attempts(TOOL, deadline=130.0) == [0, 1, 6, 21, 51, 81, 111]
    assert attempts(TOOL, deadline=0.5) == [0]


def test_an_event_is_tried_for_three_days():
    assert attempts(LIFECYCLE) == pytest.approx(
        [0, 5, 305, 2105, 9305, 27305, 63305, 113705, 185705, 72 * HOUR]
    )


def test_who_asks_for_a_time_beyond_the_last_is_not_asked_again():
    near = 72 * HOUR - 100.0
    assert next_attempt(LIFECYCLE, 9, 0.0, near, half, retry_after=99.0) == 72 * HOUR
    assert next_attempt(LIFECYCLE, 9, 0.0, near, half, retry_after=101.0) is None


@pytest.mark.parametrize("drawn", [0.0, 0.25, 0.999])
def test_jitter_is_a_tenth_either_way(drawn):
    second = attempts(LIFECYCLE, lambda: drawn)[1]
    assert second == pytest.approx(5 * (0.9 + 0.2 * drawn))
    assert attempts(LIFECYCLE, lambda: drawn)[-1] <= 72 * HOUR


@given(
    st.sampled_from([TOOL, LIFECYCLE]),
    st.integers(1, 50),
    st.floats(0, 1e6),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, HOUR),
    st.none() | st.floats(0, 1e6),
)
def test_never_sooner_than_asked_and_never_too_late(schedule, tries, now, drawn, asked, deadline):
    at = next_attempt(schedule, tries, 0.0, now, lambda: drawn, deadline=deadline, retry_after=asked)
    if at is not None:
        assert at >= now + asked
        assert at > now
        assert deadline is None or at < deadline
        assert schedule.within is None or at <= schedule.within


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("0", 0),
        (" 17 ", 17),
        ("3600", 3600),
        ("86400", HOUR),
        ("9" * 60, HOUR),
        ("9" * 100_000, None),
        ("-5", None),
        ("1.5", None),
        ("١٧", None),
        ("soon", None),
        ("", None),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30),
        ("Friday, 15-Jan-27 08:00:30 GMT", 30),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0),
        ("Fri, 15 Jan 2077 07:00:00 GMT", HOUR),
        ("Fri, 99 Jan 2027 08:00:30 GMT", None),
        ("Fri, 15 Jan 99999 08:00:30 GMT", None),
    ],
)
def test_retry_after(value, seconds):
    assert retry_after_seconds(value, 1_800_000_000.0) == seconds
