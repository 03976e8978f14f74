"""The CPU backend: the whole forward pass in C++, compiled on the machine that runs it.

Compilation happens at first use, before a worker is ready, and is kept (`build`). `csrc/` is
written once for every instruction set (`isa`); `NOTES.md` says what was measured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from kernels.cpu.build import BuildError, compiled, find_toolchain, usable_cache
from kernels.cpu.isa import Isa, available
from kernels.cpu.library import Library
from kernels.cpu.ops import CpuOps

__all__ = ["BuildError", "cpu_ops"]

log = logging.getLogger(__name__)


def cpu_ops(isas: Iterable[Isa] | None = None, cache: Path | None = None) -> CpuOps:
    """The operations for the best of `isas` (default: this machine's) that compiles.

    Raises `BuildError` if none does, with the reason of the last.
    """
    toolchain = find_toolchain()
    failure = BuildError("no instruction set to compile for")
    with nullcontext(cache) if cache else usable_cache() as folder:
        for isa in available() if isas is None else isas:
            try:
                return CpuOps(Library(compiled(isa, toolchain, folder)))
            except BuildError as error:
                failure = error
                log.warning("%s cannot be compiled here: %s", isa.name, error)
    raise failure
