"""The chunk rule against the worked example: 3 decodes, a prompt of 10,000 with 6,000 cached, 70 pages.

Numbers: pages of 16, a budget of 1,024 tokens, no reserve, unless a row says otherwise. Each row was
computed by hand arithmetic outside this project.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.scheduling.chunking import Caps, chunk_size, new_pages
from agentserve.core.scheduling.deadlines import least_slack

PAGE = 16
EDGES = {0: (100, 200, 300), 1: (96, 200, 300), 2: (96, 192, 300), 3: (96, 192, 304)}
"""Decodes of which so many have a full last page."""

Model = Callable[[int, int, int], float]
"""(decodes, chunk, tokens already cached) -> milliseconds."""


def toy(decodes: int, chunk: int, done: int) -> float:
    return 0.5 + 0.1 * decodes + 0.0025 * chunk + 1e-7 * chunk * (done + chunk / 2)


def slow(decodes: int, chunk: int, done: int) -> float:
    return 0.5 + 0.1 * decodes + 0.004 * chunk + 1e-7 * chunk * (done + chunk / 2)


def a100(decodes: int, chunk: int, done: int) -> float:
    """The published fit for Llama-3-8B on an A100 (QoServe): two regimes, neither monotone nor continuous
    where they meet. Contexts of the decodes: 200 tokens each."""
    rows, read, contexts = decodes + chunk, done if chunk else 0, 200 * decodes
    if rows <= 512:
        seconds = 0.014936 + 5.882e-5 * rows + 2.248e-5 * chunk + 3.635e-5 * decodes
        return 1e3 * (seconds + 1.111e-7 * contexts + 7.555e-7 * read)
    seconds = 0.005004 + 2.719e-5 * rows + 6.863e-5 * chunk - 4.144e-5 * decodes
    return 1e3 * (seconds + 1.663e-7 * contexts + 2.727e-6 * read)


@dataclass(frozen=True)
class Step:
    """One step's question; the answer is (chunk, its pages, tokens of the step, pages free after, limit)."""

    budget: int = 1024
    decodes: tuple[int, ...] = EDGES[0]
    suffix: int = 4000
    done: int = 6000
    free: int = 70
    reserve: int = 0
    drafts: int = 0
    slack: float | None = None
    model: Model = toy
    safety: float = 1.0
    page: int = PAGE

    def answer(self) -> tuple[int, int, int, int, str]:
        needed = sum(new_pages(stored, 1 + self.drafts, PAGE) for stored in self.decodes)
        rows = len(self.decodes) * (1 + self.drafts)
        in_time = None
        slack = self.slack
        if slack is not None:

            def in_time(count: int) -> int:
                fits = (n for n in range(count, 0, -1) if self._takes(n) <= slack)
                return next(fits, 0)

        caps = Caps(self.budget - rows, (self.free - needed - self.reserve) * PAGE, in_time)
        chunk, limit = chunk_size(self.done, self.suffix, self.page, caps)
        pages = -(-chunk // PAGE)
        return chunk, pages, rows + chunk, self.free - needed - pages, limit

    def _takes(self, count: int) -> float:
        return self.model(len(self.decodes), count, self.done) * self.safety


def at(edges: int, **changes: object) -> Step:
    return Step(decodes=EDGES[edges], **changes)  # type: ignore[arg-type]


ROWS: list[tuple[str, Step, tuple[int, int, int, int, str]]] = [
    ("V1", Step(), (1008, 63, 1011, 7, "tokens")),
    ("V2 one edge", at(1), (1008, 63, 1011, 6, "tokens")),
    ("V2 two edges", at(2), (1008, 63, 1011, 5, "tokens")),
    ("V2 three edges", at(3), (1008, 63, 1011, 4, "tokens")),
    ("V3 no rounding", at(0, page=1), (1021, 64, 1024, 6, "tokens")),
    ("V3 no rounding, edges", at(3, page=1), (1021, 64, 1024, 3, "tokens")),
    ("V4", Step(budget=1008), (992, 62, 995, 8, "tokens")),
    ("V5 1010", Step(budget=1010), (992, 62, 995, 8, "tokens")),
    ("V5 1011", Step(budget=1011), (1008, 63, 1011, 7, "tokens")),
    ("V5 1012", Step(budget=1012), (1008, 63, 1011, 7, "tokens")),
    ("V5 1019", Step(budget=1019), (1008, 63, 1011, 7, "tokens")),
    ("V5 1023", Step(budget=1023), (1008, 63, 1011, 7, "tokens")),
    ("V5 1026", Step(budget=1026), (1008, 63, 1011, 7, "tokens")),
    ("V5 1027", Step(budget=1027), (1024, 64, 1027, 6, "tokens")),
    ("V5 1028", Step(budget=1028), (1024, 64, 1027, 6, "tokens")),
    ("V6", at(0, reserve=7), (1008, 63, 1011, 7, "tokens")),
    ("V7", at(1, reserve=7), (992, 62, 995, 7, "pages")),
    ("V8", at(3, reserve=7), (960, 60, 963, 7, "pages")),
    ("V9", at(0, reserve=8), (992, 62, 995, 8, "pages")),
    ("V10", at(3, reserve=10), (912, 57, 915, 10, "pages")),
    ("reserve 5, two edges", at(2, reserve=5), (1008, 63, 1011, 5, "tokens")),
    ("reserve 6, two edges", at(2, reserve=6), (992, 62, 995, 6, "pages")),
    ("V11 66", at(3, free=66), (1008, 63, 1011, 0, "tokens")),
    ("V11 65", at(3, free=65), (992, 62, 995, 0, "pages")),
    ("V11 64", at(3, free=64), (976, 61, 979, 0, "pages")),
    ("V12 no edge", at(0, free=63), (1008, 63, 1011, 0, "tokens")),
    ("V12 one edge", at(1, free=63), (992, 62, 995, 0, "pages")),
    ("V13", at(3, free=3), (0, 0, 3, 0, "pages")),
    ("free 4, three edges", at(3, free=4), (16, 1, 19, 0, "pages")),
    ("free 1, one edge", at(1, free=1), (0, 0, 3, 0, "pages")),
    ("free 1", at(0, free=1), (16, 1, 19, 0, "pages")),
    ("V15 1000", Step(suffix=1000), (1000, 63, 1003, 7, "")),
    ("V15 1008", Step(suffix=1008), (1008, 63, 1011, 7, "")),
    ("V15 1015", Step(suffix=1015), (1015, 64, 1018, 6, "")),
    ("V15 1021", Step(suffix=1021), (1021, 64, 1024, 6, "")),
    ("drafts 1", Step(drafts=1), (1008, 63, 1014, 7, "tokens")),
    ("V16", Step(drafts=4), (1008, 63, 1023, 6, "tokens")),
    ("V17", Step(drafts=4, decodes=(108, 204, 300)), (1008, 63, 1023, 4, "tokens")),
    ("V18", Step(drafts=7), (992, 62, 1016, 7, "tokens")),
    ("V21", Step(free=7, done=7008, suffix=2992), (112, 7, 115, 0, "pages")),
    ("V21 then", Step(free=0, done=7120, suffix=2880), (0, 0, 3, 0, "pages")),
]


@pytest.mark.parametrize(("step", "answer"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_worked_example(step: Step, answer: tuple[int, int, int, int, str]) -> None:
    assert step.answer() == answer


@pytest.mark.parametrize(
    ("slack", "chunk", "takes"),
    [
        (4.0, 1008, 3.9756),
        (3.99, 1008, 3.9756),
        (3.9, 976, 3.8732),
        (3.5, 848, 3.4648),
        (3.0, 688, 2.9565),
        (2.5, 528, 2.4507),
        (2.0, 384, 1.9978),
        (1.0, 64, 0.9986),
        (0.85, 16, 0.8496),
        (0.8, 0, 0.8),
        (0.79, 0, 0.8),
    ],
)
def test_chunks_by_slack(slack: float, chunk: int, takes: float) -> None:
    assert Step(slack=slack).answer()[0] == chunk
    assert toy(3, chunk, 6000) == pytest.approx(takes, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "safety", "chunk"),
    [(toy, 1.2, 800), (slow, 1.0, 688), (slow, 1.2, 544)],
    ids=["toy", "slow", "slow-with-margin"],
)
def test_chunks_by_slack_with_caution(model: Model, safety: float, chunk: int) -> None:
    assert Step(slack=4.0, model=model, safety=safety).answer()[0] == chunk


def test_an_unattainable_deadline_stops_no_prefill() -> None:
    assert least_slack([0.79], 0.0, toy(3, 0, 6000)) == (math.inf, 1)
    assert least_slack([0.79, 2.0], 0.0, toy(3, 0, 6000)) == (2.0, 1)


def test_four_milliseconds_are_less_than_a_step_of_an_a100() -> None:
    assert a100(3, 0, 6000) > 4.0
    assert least_slack([4.0], 0.0, a100(3, 0, 6000)) == (math.inf, 1)
    assert a100(3, 510, 0) < a100(3, 509, 0), "the fit falls where its regimes meet"


@pytest.mark.parametrize(
    ("chunk", "takes"),
    [(0, 15.29), (16, 21.12), (64, 25.02), (128, 30.23), (256, 40.63), (512, 70.48), (1008, 118.01)],
)
def test_a_published_fit(chunk: int, takes: float) -> None:
    assert a100(3, chunk, 6000) == pytest.approx(takes, abs=0.005)


@pytest.mark.parametrize(
    ("suffix", "done", "chunks"),
    [(4000, 6000, [1008, 1008, 1008, 976]), (4096, 6144, [1008, 1008, 1008, 1008, 64])],
)
def test_a_prompt_in_steps(suffix: int, done: int, chunks: list[int]) -> None:
    ran = []
    while suffix:
        chunk, *_ = Step(suffix=suffix, done=done, free=10_000).answer()
        ran.append(chunk)
        suffix, done = suffix - chunk, done + chunk
    assert ran == chunks


def test_a_start_within_a_page_ends_on_an_edge() -> None:
    assert chunk_size(21, 100, 16, Caps(40, 10_000)) == (27, "tokens")  # to 48
    assert chunk_size(21, 100, 16, Caps(10, 10_000)) == (0, "tokens")


@given(
    start=st.integers(0, 200),
    lag=st.integers(1, 300),
    page=st.sampled_from([1, 4, 16]),
    tokens=st.integers(-3, 300),
    pages=st.integers(-40, 300),
    time=st.none() | st.integers(0, 300),
    more=st.integers(0, 64),
)
def test_no_cap_is_passed_and_more_is_never_less(
    start: int, lag: int, page: int, tokens: int, pages: int, time: int | None, more: int
) -> None:
    def caps(extra: int) -> Caps:
        in_time = None if time is None else lambda count: min(count, time + extra)
        return Caps(tokens + extra, pages + extra, in_time)

    count, limit = chunk_size(start, lag, page, caps(0))
    assert 0 <= count <= lag
    assert count <= max(0, min(tokens, pages, lag if time is None else time))
    assert count == lag or (start + count) % page == 0 or count == 0
    assert (count == lag) == (not limit)
    assert chunk_size(start, lag, page, caps(more))[0] >= count


@given(st.integers(0, 500), st.integers(1, 40), st.sampled_from([1, 4, 16]))
def test_new_pages_are_those_that_are_entered(stored: int, count: int, page: int) -> None:
    before = {position // page for position in range(stored)}
    after = {position // page for position in range(stored + count)}
    assert new_pages(stored, count, page) == len(after - before)
