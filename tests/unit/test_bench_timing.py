"""How the kernel benchmark times, on a clock of its own; and which pages its contexts get."""

from __future__ import annotations

import pytest
import torch

from agentserve.bench.kernels.scene import Scene
from agentserve.bench.kernels.timing import Effort, Rates, Run, Stopwatch, Timed, each, timed
from agentserve.executor.pool import KVPool
from agentserve.models.hf_config import hf_config
from tests.parity.harness import config_json

RATES = Rates(read=40e9, float_ops=900e9, int8_ops=1800e9)


class Hand:
    """A clock that moves only when something runs, and a gauge that takes a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.now

    def rates(self) -> Rates:
        self.now += 1.0
        self.ran.append("gauge")
        return RATES

    def work(self, name: str, seconds: float) -> Run:
        def run() -> None:
            self.ran.append(name)
            self.now += seconds

        return timed(run, self)


def test_variants_run_in_turning_order_with_the_machine_measured_in_between() -> None:
    hand = Hand()
    watch = Stopwatch(hand, Effort(runs=3, most=9, seconds=0.0, total=1000.0), hand)
    found = watch.alternate({"a": hand.work("a", 2.0), "b": hand.work("b", 3.0)})
    assert hand.ran == ["a", "b", "gauge", "a", "b", "gauge", "b", "a", "gauge", "a", "b"]
    assert found["a"] == Timed((2.0,) * 3, (RATES,) * 3), "the one to warm up does not count"
    assert found["b"].seconds == (3.0,) * 3
    assert watch.seen == [RATES] * 3


def test_short_work_runs_until_its_time_is_spent_and_never_more_than_allowed() -> None:
    hand = Hand()
    watch = Stopwatch(hand, Effort(runs=3, most=50, seconds=20.0, total=1000.0), hand)
    assert len(watch.alone(hand.work("a", 1.0), warm=False).seconds) == 10, "a gauge and a run: 2 seconds"
    watch = Stopwatch(hand, Effort(runs=3, most=7, seconds=20.0, total=1000.0), hand)
    assert len(watch.alone(hand.work("a", 0.001)).seconds) == 7


def test_when_the_time_is_up_everything_runs_once_and_is_counted() -> None:
    hand = Hand()
    watch = Stopwatch(hand, Effort(runs=3, most=9, seconds=0.0, total=10.0), hand)
    assert len(watch.alone(hand.work("a", 2.0)).seconds) == 3
    assert watch.hurried == 0
    late = watch.alternate({"a": hand.work("a", 1.0), "b": hand.work("b", 1.0)})
    assert [len(times.seconds) for times in late.values()] == [1, 1]
    assert watch.hurried == 2
    assert not watch.over


def test_a_row_under_way_ends_when_the_time_is_up() -> None:
    hand = Hand()
    watch = Stopwatch(hand, Effort(runs=5, most=9, seconds=0.0, total=10.0, stop=20.0), hand)
    assert len(watch.alone(hand.work("a", 4.0), warm=False).seconds) == 3
    assert watch.hurried == 1
    watch.alone(hand.work("a", 6.0))
    assert watch.over


def test_each_counts_the_mean_of_its_works() -> None:
    hand = Hand()

    def two() -> None:
        hand.now += 2.0

    def four() -> None:
        hand.now += 4.0

    assert each([two, four, two, four], hand)() == 3.0


@pytest.fixture
def scene() -> Scene:
    config = hf_config(config_json("llama"), "llama")
    return Scene(config, KVPool(config, [40], 16, torch.float32))


def test_contexts_have_pages_of_their_own_scattered_over_the_pool(scene: Scene) -> None:
    tables = scene.tables(5, 100)
    pages = [page for table in tables for page in table]
    assert [len(table) for table in tables] == [7] * 5
    assert len(set(pages)) == 35
    assert pages != sorted(pages)
    assert scene.fits(5, 128)
    assert not scene.fits(6, 112 + 1)
    with pytest.raises(ValueError, match="6 contexts of 128 tokens"):
        scene.tables(6, 128)


def test_a_shared_prefix_is_the_first_contexts_pages(scene: Scene) -> None:
    first, *others = scene.tables(4, 100, shared=50)
    for table in others:
        assert table[:3] == first[:3], "whole pages only"
        assert not set(table[3:]) & set(first)
    assert len({page for table in (first, *others) for page in table}) == 3 + 4 * 4


def test_chunks_cover_a_prompt_once(scene: Scene) -> None:
    parts = [part for step in scene.prefill(100, 32) for part in step]
    assert [(part.start, part.count) for part in parts] == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert scene.prefill(100)[0][0].count == 100


def test_every_page_gets_the_first_contexts_kv(scene: Scene) -> None:
    copies = scene.spread(100)
    first = set(scene.tables(1, 100)[0])
    assert {source for source, _ in copies} == first
    assert first | {target for _, target in copies} == set(range(40))
    assert not first & {target for _, target in copies}
