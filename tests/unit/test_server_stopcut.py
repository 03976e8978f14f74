"""Stop strings: nothing of one is shown, nothing else is lost, however the text is split."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agentserve.server.sessions.stopcut import StopCutter

texts = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> str:
    """The oracle: cut at the stop string that is complete first, of several the earliest."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def fold(pieces: list[str], stops: list[str]) -> tuple[str, list[str]]:
    cutter = StopCutter(stops)
    shown = [cutter.push(piece) for piece in pieces] + [cutter.flush()]
    return "".join(shown), shown


@given(texts, stop_lists, st.lists(st.integers(0, 30)))
def test_any_split_shows_the_text_up_to_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    by_character, _ = fold(list(text), stops)
    assert by_character == first_stop(text, stops)
    if len(text) <= 1 or all(len(piece) <= 1 for piece in pieces):
        return
    shown, _ = fold(pieces, stops)
    assert shown == first_stop(text, stops)


@given(texts, stop_lists)
def test_only_what_may_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    cutter = StopCutter(stops)
    shown = ""
    for at, character in enumerate(text, 1):
        shown += cutter.push(character)
        if cutter.hit is not None:
            return
        held = text[len(shown) : at]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_an_inactive_stop_passes_and_a_later_one_cuts() -> None:
    cutter = StopCutter(["."])
    assert cutter.push("a.", active=False) == "a."
    assert cutter.push("b.c") == "b"
    assert cutter.hit == "."
    assert cutter.push("more") == ""
    assert cutter.flush() == ""


def test_a_stop_that_becomes_complete_when_active() -> None:
    cutter = StopCutter(["xyz"])
    assert cutter.push("axy", active=False) == "a"
    assert cutter.push("z!") == ""
    assert cutter.hit == "xyz"


def test_without_stops_text_passes_at_once() -> None:
    cutter = StopCutter([])
    assert cutter.push("abc") == "abc"
    assert cutter.flush() == ""
