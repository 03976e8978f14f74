"""The cost model: never negative, monotone in every feature, continuous, and its inverse exact."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.cost import StepCost
from agentserve.core.timing.features import StepLoad
from agentserve.core.timing.tally import EVERYTHING, Attention, Tally, Wanted
from agentserve.types import KVGroup, Sampling

SCALES = {
    "fixed": 0.02, "per_row": 1e-3, "per_token": 1e-3, "per_context": 1e-6, "per_decode": 1e-3,
    "per_chunk": 1e-3, "per_chunk_token": 1e-3, "per_seen": 1e-6, "per_read": 1e-6, "per_pair": 1e-6,
    "per_reach": 1e-6, "per_sample": 1e-3, "per_drawn": 1e-3, "per_masked": 1e-3, "per_copy": 1e-3,
    "per_copied_byte": 1e-8,
}  # fmt: skip
WINDOWED = Attention(
    (KVGroup("full", (0, 3), 1024), KVGroup("window", (1, 2, 4), 1536, window=100)), page_size=16
)
GREEDY = Sampling(temperature=0.0)
COUNTS = st.integers(0, 40)
AMOUNTS = st.floats(0, 1e6)


@st.composite
def costs(draw: st.DrawFn) -> StepCost:
    """Any coefficients, many of them 0, as a fit gives them."""
    parts = {
        name: draw(st.one_of(st.just(0.0), st.floats(0, scale, allow_subnormal=False)))
        for name, scale in SCALES.items()
    }
    knots = draw(st.lists(st.integers(1, 600), unique=True, max_size=4))
    knots = [0, *sorted(knots)]
    slopes = draw(st.lists(st.floats(0, 1e-3), min_size=len(knots), max_size=len(knots)))
    return StepCost(
        **parts, knots=tuple(knots), slopes=tuple(slopes), pace=draw(st.floats(0.1, 10)),
        ratio=draw(st.floats(1, 3)), extra=draw(st.floats(0, 0.1)),
    )  # fmt: skip


@st.composite
def loads(draw: st.DrawFn) -> StepLoad:
    counts = {
        name: draw(COUNTS) for name in ("decodes", "chunks", "tokens", "samples", "drawn", "masked", "copies")
    }
    amounts = {name: draw(AMOUNTS) for name in ("context", "read", "pairs", "reach", "copied")}
    return StepLoad(**counts, **amounts)


@given(costs(), loads(), st.sampled_from(StepLoad.__struct_fields__), st.integers(1, 1000))
def test_more_of_anything_takes_no_less(cost: StepCost, load: StepLoad, name: str, more: int) -> None:
    larger = msgspec.structs.replace(load, **{name: getattr(load, name) + more})
    assert 0 <= cost.predict(load) <= cost.predict(larger)
    assert cost.predict(load) <= cost.bound(load) <= cost.bound(larger)


@given(costs(), loads(), st.integers(0, 700))
def test_no_step_jumps(cost: StepCost, load: StepLoad, rows: int) -> None:
    """One more token row adds no more than the dearest row does, wherever the knots are."""
    before = msgspec.structs.replace(load, decodes=0, tokens=rows)
    after = msgspec.structs.replace(before, tokens=rows + 1)
    dearest = cost.per_token + cost.per_chunk_token + max(cost.slopes)
    grown = cost.predict(after) - cost.predict(before)
    assert grown <= cost.pace * dearest * (1 + 1e-9) + 1e-9 * cost.predict(after)


@given(costs(), loads())
def test_the_bound_is_a_line_over_the_prediction(cost: StepCost, load: StepLoad) -> None:
    assert cost.bound(load) == cost.at_worst(cost.predict(load))
    assert cost.at_worst(0.0) == cost.extra


@settings(max_examples=60)
@given(
    cost=costs(),
    decodes=st.lists(st.integers(0, 3000), max_size=6),
    start=st.integers(0, 3000),
    most=st.integers(0, 160),
    lag=st.integers(1, 200),
    attention=st.sampled_from([EVERYTHING, WINDOWED]),
    sampling=st.sampled_from([None, GREEDY, Sampling(grammar="g")]),
    share=st.floats(0, 1.2),
)
def test_the_largest_chunk_is_the_largest(
    cost: StepCost, decodes: list[int], start: int, most: int, lag: int, attention: Attention,
    sampling: Sampling | None, share: float,
) -> None:  # fmt: skip
    tally = Tally(attention)
    for position in decodes:
        tally.decode(position, GREEDY)

    def bound(count: int) -> float:
        return cost.bound(tally.with_chunk(start, count, sampling if count >= lag else None))

    least, greatest = bound(1), bound(max(most, 1))
    budget = least * 0.9 + share * (greatest - least * 0.9)
    fitting = [count for count in range(1, most + 1) if bound(count) <= budget]
    assert cost.largest(tally, Wanted(start, most, lag, sampling), budget) == max(fitting, default=0)
    longer = [count for count in fitting if count > 1]  # a single token is a decode, which may cost more
    assert longer == list(range(2, len(longer) + 2)), "a larger chunk fits where a smaller does not"


def test_the_inverse_takes_few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = StepCost(fixed=0.003, per_pair=1e-7, knots=(0, 8, 128), slopes=(1e-5, 2e-4, 3e-4), ratio=1.1)
    trials = 0
    bound = StepCost.bound

    def counted(self: StepCost, load: StepLoad) -> float:
        nonlocal trials
        trials += 1
        return bound(self, load)

    monkeypatch.setattr(StepCost, "bound", counted)
    found = cost.largest(Tally(EVERYTHING), Wanted(1000, 8192, 9000), 0.5)
    assert 0 < found < 8192
    assert trials <= 10


def test_the_worked_example_is_a_model() -> None:
    """T = 0.5 + 0.1 n + 0.0025 c + 1e-7 c (6000 + c / 2) milliseconds: n decodes, a chunk of c behind 6,000
    tokens. A chunk's c-th token sees itself, so its pairs are c / 2 more than c x c / 2."""
    cost = StepCost(fixed=0.5e-3, per_decode=0.1e-3, per_chunk_token=0.0025e-3 - 0.5e-10, per_pair=1e-10)
    tally = Tally(EVERYTHING)
    for position in (100, 200, 300):
        tally.decode(position, GREEDY)
    for slack, chunk in (
        (4.0, 1008), (3.99, 1008), (3.9, 976), (3.5, 848), (3.0, 688), (2.5, 528), (2.0, 384), (1.0, 64),
        (0.85, 16), (0.799, 0), (0.79, 0),
    ):  # fmt: skip
        found = cost.largest(tally, Wanted(6000, 1021, 4000), slack * 1e-3)
        assert found // 16 * 16 == chunk
    for count in (2, 16, 384, 1008):
        toy = 0.8 + 0.0025 * count + 1e-7 * count * (6000 + count / 2)
        assert cost.predict(tally.with_chunk(6000, count, None)) * 1e3 == pytest.approx(toy, rel=1e-12)


def test_a_prefill_in_steps_is_a_line_for_tiers() -> None:
    cost = StepCost(
        fixed=0.003, per_chunk=1e-4, per_pair=1e-7, per_reach=2e-6, knots=(0, 64), slopes=(1e-4, 3e-4)
    )
    chunk = 256
    steps = sum(cost.step([(start, chunk)]) for start in range(0, 16 * chunk, chunk))
    _, per_token, per_pair = cost.prefill_line(chunk)
    tokens = 16 * chunk
    assert per_token * tokens + per_pair * tokens * (tokens + 1) / 2 == pytest.approx(steps, rel=0.02)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"per_token": -1.0}, "per_token"),
        ({"per_pair": math.nan}, "per_pair"),
        ({"fixed": math.inf}, "fixed"),
        ({"slopes": (-1e-9,), "knots": (0,)}, "slopes"),
        ({"knots": (0, 5)}, "knots"),
        ({"knots": (5,), "slopes": (0.1,)}, "knots"),
        ({"knots": (0, 7, 5), "slopes": (0.1, 0.1, 0.1)}, "knots"),
        ({"ratio": 0.99}, "ratio"),
        ({"pace": 0.0}, "pace"),
    ],
)
def test_what_would_not_be_monotone_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StepCost(**wrong)  # type: ignore[arg-type]


def test_what_knows_nothing_says_so() -> None:
    assert not StepCost().known
    assert StepCost(per_token=1e-3).known
    assert not StepCost(per_token=1e-3).bounded
    assert StepCost(extra=1e-3).bounded
