"""The compiled CPU backends of this machine for tests, and what their tests share."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import BuildError, cpu_ops
from kernels.cpu.build import Toolchain, find_toolchain
from kernels.cpu.isa import AVX2, Isa, available
from kernels.cpu.ops import CpuOps
from kernels.ops import AttentionShape, Span

EVERY = tuple(available())
CHECKED = tuple(isa for number, isa in enumerate(EVERY) if number == 0 or isa == AVX2)
"""The best instruction set here, and AVX2: for whole models. Single operations are tested with all."""


def compiler() -> Toolchain:
    """This machine's; a test without one is skipped. Sources that do not compile are a failure."""
    try:
        return find_toolchain()
    except BuildError as error:
        pytest.skip(str(error))


def build_of(isa: Isa) -> CpuOps:
    """The backend for `isa`: compiled once per machine, whoever asks first."""
    compiler()
    return cpu_ops([isa])


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


def counted(folder: Path, toolchain: Toolchain, after: str = "") -> tuple[Toolchain, Callable[[], int]]:
    """A compiler that notes each of its runs, and how many there were."""
    notes, script = folder / "runs", folder / "compiler"
    script.write_text(f'#!/bin/sh\necho run >> "{notes}"\n{after}\nexec "{toolchain.compiler}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return (
        Toolchain(str(script), toolchain.version, toolchain.openmp),
        lambda: len(notes.read_text().split()) if notes.exists() else 0,
    )


def attend_pieces(
    ops: CpuOps,
    shape: AttentionShape,
    tables: Tensor,
    q: Tensor,
    kv: Tensor,
    pieces: Sequence[tuple[int, int, int]],
) -> list[Tensor]:
    """Attention of each (sequence, first, end), all in one step; `q [sequences, length, heads, dim]`."""
    spans, row = [], 0
    for _, first, end in pieces:
        spans.append(Span(row, end - first, first))
        row += end - first
    rows = torch.cat([q[number, first:end] for number, first, end in pieces])
    found = ops.attention(shape, spans, torch.stack([tables[number] for number, _, _ in pieces]))(rows, kv)
    return list(found.split([end - first for _, first, end in pieces]))
