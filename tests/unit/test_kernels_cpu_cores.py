"""Threads of the compiled operations keep to cores of their own; the thread that calls is let go again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu import cpu_ops
from kernels.cpu.ops import CpuOps
from tests.cpu_builds import normal

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)


@pytest.fixture
def ops() -> Iterator[CpuOps]:
    """Computing with two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    built = cpu_ops()
    yield built
    all_cores = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():  # what was kept is free for the tests after this
        os.sched_setaffinity(int(thread.name), all_cores)
    built.keep_to_cores([])
    torch.set_num_threads(threads)


def kept() -> list[set[int]]:
    """The cores of each of this process's threads that may not use them all."""
    masks = [os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
    return [mask for mask in masks if mask != os.sched_getaffinity(0)]


def test_each_thread_keeps_to_its_core_and_the_caller_does_not(ops: CpuOps) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    linear, x = ops.linear(normal(256, 256)), normal(64, 256, seed=1)
    free = linear(x)
    assert kept() == []
    ops.keep_to_cores([first, second])
    assert torch.equal(linear(x), free)
    assert kept() == [{second}]
    ops.keep_to_cores([second, first])
    assert torch.equal(linear(x), free)
    assert kept() == [{first}]


def test_a_team_of_another_size_is_left_alone(ops: CpuOps) -> None:
    linear, x = ops.linear(normal(256, 256)), normal(64, 256, seed=1)
    free = linear(x)
    ops.keep_to_cores(sorted(os.sched_getaffinity(0))[:1])
    assert torch.equal(linear(x), free)
    assert kept() == []


def test_a_core_that_is_not_there_changes_nothing(ops: CpuOps) -> None:
    linear, x = ops.linear(normal(256, 256)), normal(64, 256, seed=1)
    free = linear(x)
    ops.keep_to_cores([1000, 1001])
    assert torch.equal(linear(x), free)
    assert kept() == []
