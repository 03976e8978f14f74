"""Sampling kernels in Triton's interpreter: against the host's functions, and exactly against integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.executor.draws import uniform
from agentserve.executor.filters import draw as host_draw
from agentserve.types import Sampling
from kernels.ops import Draw
from kernels.triton import sampling, sampling_kernels
from kernels.triton.launch import Choice, launch
from kernels.triton.philox import uniforms
from kernels.triton.sampling import TritonDrawing, best_of, packed, scale_bits

CPU = torch.device("cpu")
TILE = 32
INF = math.inf


def draw(values: np.ndarray, draws: Sequence[Draw], tile: int = TILE) -> list[int]:
    tokens: list[int] = TritonDrawing(tile=tile)(torch.tensor(values, dtype=torch.float32), draws).tolist()
    return tokens


def asked(seed: int, **settings: float) -> Draw:
    known = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    return Draw(
        temperature=known["temperature"],
        top_k=int(known["top_k"]),
        top_p=known["top_p"],
        min_p=known["min_p"],
        seed=seed,
        position=seed % 97,
    )


def on_host(row: np.ndarray, one: Draw) -> int:
    like = Sampling(temperature=one.temperature, top_k=one.top_k, top_p=one.top_p, min_p=one.min_p)
    with np.errstate(all="ignore"):
        return host_draw(row.astype(np.float32), like, uniform(one.seed, one.position))


def exactly(row: np.ndarray, one: Draw) -> int:
    """The rules of `sampling.py` in Python's integers, by sorting everything."""
    scale = 2 ** scale_bits(len(row))
    peak = float(row.max())
    if peak == -INF:
        row, peak, one = np.zeros(len(row), np.float32), 0.0, asked(one.seed)
    with np.errstate(all="ignore"):
        weights = np.exp((row.astype(np.float64) - peak) / one.temperature).tolist()
    units = [int(weight * scale + 0.5) for weight in weights]
    if 0 < one.top_k < len(row):
        cut = np.sort(row)[-one.top_k]
        units = [u if v >= cut else 0 for u, v in zip(units, row, strict=True)]
    if one.top_p < 1.0:
        goal, mass, inside = one.top_p * float(sum(units)), 0, set()
        for i in sorted(range(len(units)), key=lambda i: (-units[i], i)):
            if mass >= goal and inside:
                break
            inside.add(i)
            mass += units[i]
        units = [u if i in inside else 0 for i, u in enumerate(units)]
    floor = int(min(one.min_p, 1.0) * scale + 0.5)
    units = [u if u >= floor else 0 for u in units]
    target = int(uniform(one.seed, one.position) * 2**53) * sum(units) >> 53
    mass = 0
    for i, u in enumerate(units):
        mass += u
        if mass > target:
            return i
    raise AssertionError("u is below 1")


SEEDS = [0, 1, -1, -5, 2**63, 2**64 - 1, 2**70 + 5, -(2**127), 2**128 + 7, 10**40]
POSITIONS = [0, 1, 2, 3, 2**40, 2**63 - 1, 7, 8, 9, 10]


def test_uniform_numbers_are_the_hosts_bit_for_bit():
    expected = [uniform(seed, position) for seed, position in zip(SEEDS, POSITIONS, strict=True)]
    assert uniforms(SEEDS, POSITIONS, CPU).tolist() == expected
    assert uniforms([], [], CPU).tolist() == []


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(), st.integers(0, 2**63 - 1)), min_size=1, max_size=140))
def test_uniform_numbers_of_any_seed(pairs):
    seeds, positions = zip(*pairs, strict=True)
    expected = [uniform(seed, position) for seed, position in pairs]
    assert uniforms(seeds, positions, CPU).tolist() == expected


def test_the_best_is_the_first_among_equals_and_what_is_not_finite_is_told():
    rng = np.random.default_rng(0)
    values = torch.tensor(rng.normal(size=(9, 150)).astype(np.float32))
    values[1] = values[1].round()
    values[2] = -INF
    values[2, 140] = -1e30
    values[3, 5], values[3, 7] = -0.0, 0.0
    values[3, 8:] = -1.0
    values[3, :5] = -2.0
    values[3, 6] = -2.0
    values[4, 149] = 3e38
    expected = values.argmax(dim=-1).tolist()
    values[5, 149] = math.nan
    values[6, 0] = INF
    values[7] = math.nan
    values[8] = -INF
    best, finite = best_of(values, TILE)
    assert best.dtype == torch.int64
    assert finite.dtype == torch.bool
    assert finite.tolist() == [True, True, False, True, True, False, False, False, False]
    assert best.tolist()[:5] == expected[:5]
    assert best[3] == 5
    assert all(0 <= token < 150 for token in best.tolist())  # safe to look up, whatever the logits
    for tile in (256, 16):
        again = best_of(values, tile)
        assert torch.equal(again[0], best)
        assert torch.equal(again[1], finite)


def test_the_best_of_rows_that_lie_in_a_wider_buffer():
    buffer = torch.full((3, 96), INF)
    buffer[:, :77] = torch.tensor(np.random.default_rng(1).normal(size=(3, 77)), dtype=torch.float32)
    values = buffer[:, :77]
    best, finite = best_of(values, TILE)
    assert best.tolist() == values.argmax(dim=-1).tolist()
    assert finite.tolist() == [True] * 3
    draws = [asked(n) for n in range(3)]
    assert TritonDrawing(TILE)(values, draws).tolist() == draw(values.numpy(), draws)


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-300},
    {"temperature": 1e300, "top_p": 0.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 999},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.1, "temperature": 0.8},
]


def rows_of(kind: str, count: int, vocab: int = 75) -> np.ndarray:
    rng = np.random.default_rng(len(kind))
    values = rng.normal(size=(count, vocab)).astype(np.float32) * 3
    if kind == "ties":
        values = values.round()
    if kind == "few":
        values[:, rng.random(vocab) < 0.8] = -INF
    return values


@pytest.mark.parametrize("kind", ["plain", "ties", "few"])
def test_draws_are_the_hosts(kind):
    values = rows_of(kind, len(SETTINGS))
    draws = [asked(n, **settings) for n, settings in enumerate(SETTINGS)]
    got = draw(values, draws)
    assert got == [exactly(row, one) for row, one in zip(values, draws, strict=True)]
    assert got == [on_host(row, one) for row, one in zip(values, draws, strict=True)]


LOGITS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -INF, 1e38, -1e38, 1e-40]), st.floats(-20, 20, width=32)
)


@settings(max_examples=10, deadline=None)
@given(
    row=st.lists(LOGITS, min_size=1, max_size=40),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.05, 1.0, 3.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1.0, 0.999, 0.5, 0.25, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_draws_are_exact(row, seed, temperature, top_k, top_p, min_p):
    values = np.array(row, dtype=np.float32)
    one = asked(seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert draw(values[None], [one], tile=16) == [exactly(values, one)]


@pytest.mark.prove
@settings(max_examples=400, deadline=None)
@given(
    row=st.lists(LOGITS, min_size=1, max_size=200),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.floats(0.01, 100),
    top_k=st.integers(0, 210),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    tile=st.sampled_from([16, 64]),
)
def test_draws_of_anything_are_exact(row, seed, temperature, top_k, top_p, min_p, tile):
    values = np.array(row, dtype=np.float32)
    one = asked(seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert draw(values[None], [one], tile) == [exactly(values, one)]


def test_of_equals_the_nucleus_takes_the_first_across_tiles():
    """70 equal logits: half of the mass are the first 35, three of the second tile among them."""
    values = np.zeros((3, 70), dtype=np.float32)
    chances = {seed: uniform(seed, seed % 97) for seed in range(100)}
    seeds = sorted(chances, key=chances.__getitem__)[:: len(chances) // 2 - 1]  # small, middling, large
    got = draw(values, [asked(seed, top_p=0.5) for seed in seeds])
    assert got == [int(chances[seed] * 35) for seed in seeds]
    assert got[-1] >= TILE


def test_one_candidate_and_none():
    single = np.array([[5.0]], dtype=np.float32)
    assert draw(single, [asked(3, top_k=1, top_p=0.1, min_p=0.5)], 16) == [0]
    values = np.full((2, 40), -INF, dtype=np.float32)
    values[0, 33] = -7.0
    draws = [asked(1, top_p=0.4), asked(2, top_p=0.4, top_k=3, min_p=0.9)]
    assert draw(values, draws) == [33, int(uniform(2, 2) * 40)]  # where nothing is likely, all are alike
    assert draw(values[:0], []) == []
    with pytest.raises(ValueError, match="1 draws for 2 rows"):
        draw(values, draws[:1])


def test_zeros_of_both_signs_tie():
    values = np.array([[3.0, -0.0, 2.0, 0.0, -0.5]] * 8, dtype=np.float32)
    draws = [asked(seed, top_k=3, temperature=99.0) for seed in range(8)]
    got = draw(values, draws, 16)
    assert got == [on_host(row, one) for row, one in zip(values, draws, strict=True)]
    assert {1, 3} < set(got)
    assert 4 not in got


def test_a_running_sum_that_equals_the_target_is_not_above_it():
    """Weights of a few units, in two tiles: u * sum falls on edges all the time."""
    units = torch.zeros((12, 32), dtype=torch.int64)
    for place, amount in ((2, 1), (5, 2), (15, 1), (18, 3), (31, 1)):
        units[:, place] = amount
    draws = [asked(seed) for seed in range(12)]
    least, last = torch.zeros(12, dtype=torch.int64), torch.full((12,), 32)
    tokens = torch.empty(12, dtype=torch.int64)
    launch(
        sampling_kernels.pick,
        (12,),
        *(units, packed(draws, 32), least, last, units.view(12, 2, 16).sum(dim=-1), tokens),
        choice=Choice({"tile": 16}),
        vocab=32,
        tiles=2,
        width=2,
    )
    owners = [2, 5, 5, 15, 18, 18, 18, 31]
    expected = [owners[int(uniform(one.seed, one.position) * 8)] for one in draws]
    assert tokens.tolist() == expected
    assert len(set(expected)) > 3


def test_a_row_does_not_depend_on_its_batch_mates():
    """Nor on tiles, nor on how many rows are drawn at a time."""
    values = np.concatenate([rows_of("ties", 4, 50), rows_of("plain", 2, 50)])
    draws = [asked(n, **SETTINGS[at]) for n, at in enumerate([11, 0, 7, 5, 9, 4])]
    together = draw(values, draws)
    assert len(set(together)) > 2
    assert [draw(values[n : n + 1], draws[n : n + 1])[0] for n in range(6)] == together
    order = [4, 1, 0]
    assert draw(values[order], [draws[n] for n in order]) == [together[n] for n in order]
    assert draw(values, draws, tile=128) == together
    tensor = torch.tensor(values)
    assert TritonDrawing(TILE, scratch_bytes=1)(tensor, draws).tolist() == together  # four at a time
    assert torch.equal(tensor, torch.tensor(values))


def test_weights_can_be_added_up():
    for vocab in (1, 2, 3, 1000, 49152, 131072, 131073, 262144):
        assert vocab * 2 ** scale_bits(vocab) < 2**63
        assert 44 <= scale_bits(vocab) <= 52


def test_cases_name_every_argument_once():
    cases = list(sampling.cases())
    assert len({case.name for case in cases}) == len(cases) > 20
    for case in cases:
        given_names = [*case.signature, *case.constants, *case.choice.tiles]
        assert sorted(given_names) == sorted(case.kernel.arg_names)
