from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentserve.executor.stops import StopFold, StopHit


def run(stops, pieces):
    fold = StopFold(stops)
    return [fold.push(piece) for piece in pieces]


def oracle(stops, text):
    """The first hit of a whole text: the earliest end, then the earliest start."""
    hits = [
        (at + len(s), at)
        for s in (stop.encode() for stop in stops)
        for at in range(len(text))
        if s and text.startswith(s, at)
    ]
    return StopHit(min(hits)[1], min(hits)[0]) if hits else None


def test_a_stop_over_four_tokens():
    assert run(["<END>"], [b"a<", b"E", b"N", b"D> more"]) == [None, None, None, StopHit(1, 6)]


def test_a_near_miss_then_the_stop():
    assert run(["aab"], [b"a", b"a", b"a", b"c", b"aa", b"b"])[-1] == StopHit(4, 7)
    assert run(["aab"], [b"a", b"a", b"a", b"b"]) == [None, None, None, StopHit(1, 4)]


def test_overlapping_stops_end_at_the_shorter_whatever_the_cut():
    assert run(["abc", "ab"], [b"xabc"]) == [StopHit(1, 3)]
    assert run(["abc", "ab"], [b"xa", b"b", b"c"])[1] == StopHit(1, 3)
    assert run(["b", "ab"], [b"ab"]) == [StopHit(0, 2)]  # of two that end together the longer


def test_a_stop_inside_and_across_characters():
    text = "né 😀 fin".encode()
    assert run(["😀"], [text[i : i + 1] for i in range(len(text))])[7] == StopHit(4, 8)
    # Half a character never matches: é is C3 A9, © is C2 A9.
    assert run(["©"], [b"\xc3", b"\xa9"]) == [None, None]


def test_a_hit_is_reported_once_and_a_later_one_again():
    assert run(["ab"], [b"ab", b"x", b"", b"a", b"b"]) == [StopHit(0, 2), None, None, None, StopHit(3, 5)]


def test_empty_stops_and_empty_tokens_stop_nothing():
    assert run([""], [b"abc", b""]) == [None, None]
    assert run([], [b"abc"]) == [None]


@given(
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("abé", max_size=30),
    st.data(),
)
def test_the_first_hit_is_that_of_the_whole_text_for_every_cut(stops, text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    edges = [0, *cuts, len(raw)]
    hits = run(stops, [raw[a:b] for a, b in pairwise(edges)])
    assert next((hit for hit in hits if hit), None) == oracle(stops, raw)
