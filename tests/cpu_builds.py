"""The compiled CPU backends of this machine for tests, and what their tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import BuildError, cpu_ops
from kernels.cpu.isa import AVX2, Isa, available
from kernels.cpu.ops import CpuOps

EVERY = tuple(available())
CHECKED = tuple(isa for number, isa in enumerate(EVERY) if number == 0 or isa == AVX2)
"""The best instruction set here, and AVX2: for whole models. Single operations are tested with all."""


def build_of(isa: Isa) -> CpuOps:
    """The backend for `isa`: compiled once per machine, whoever asks first."""
    try:
        return cpu_ops([isa])
    except BuildError as error:
        pytest.skip(str(error))


def builds(isas: Sequence[Isa] = EVERY) -> Any:
    """A fixture: each of `isas` in turn."""

    @pytest.fixture(scope="module", params=isas, ids=lambda isa: isa.name)
    def ops(request: pytest.FixtureRequest) -> CpuOps:
        return build_of(request.param)

    return ops


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
