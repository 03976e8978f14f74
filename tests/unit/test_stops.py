from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentserve.executor.stops import StopFold


def run(stops, pieces):
    fold = StopFold(stops)
    return [fold.push(piece) for piece in pieces]


def test_a_stop_over_four_tokens():
    assert run(["<END>"], [b"a<", b"E", b"N", b"D> more"]) == [False, False, False, True]


def test_a_near_miss_then_the_stop():
    assert run(["aab"], [b"a", b"a", b"a", b"c", b"aa", b"b"]) == [False] * 5 + [True]
    assert run(["aab"], [b"a", b"a", b"a", b"b"]) == [False, False, False, True]


def test_overlapping_stops():
    assert run(["abc", "ab"], [b"xa", b"b", b"c"]) == [False, True, True]
    assert run(["b", "ab"], [b"ab"]) == [True]


def test_a_stop_inside_and_across_characters():
    text = "né 😀 fin".encode()
    hits = run(["😀"], [text[i : i + 1] for i in range(len(text))])
    assert [i for i, hit in enumerate(hits) if hit] == [7]
    # Half a character never matches: é is C3 A9, © is C2 A9.
    assert run(["©"], [b"\xc3", b"\xa9"]) == [False, False]


def test_a_hit_is_reported_once_and_a_later_one_again():
    assert run(["ab"], [b"ab", b"x", b"", b"a", b"b"]) == [True, False, False, False, True]


def test_empty_stops_and_empty_tokens_stop_nothing():
    assert run([""], [b"abc", b""]) == [False, False]
    assert run([], [b"abc"]) == [False]


@given(
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("abé", max_size=30),
    st.data(),
)
def test_hits_are_those_of_the_whole_text_for_every_cut(stops, text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    edges = [0, *cuts, len(raw)]
    ends = {at + len(s) for s in map(str.encode, stops) for at in range(len(raw)) if raw.startswith(s, at)}
    hits = run(stops, [raw[a:b] for a, b in pairwise(edges)])
    assert hits == [any(a < end <= b for end in ends) for a, b in pairwise(edges)]
