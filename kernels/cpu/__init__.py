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
from kernels.cpu.reason import reason

__all__ = ["BuildError", "cpu_backend", "cpu_ops"]

log = logging.getLogger(__name__)


def cpu_ops(isas: Iterable[Isa] | None = None, cache: Path | None = None) -> CpuOps:
    """The operations for the best of `isas` (default: this machine's) that compiles.

    Raises `BuildError` if none does, with the reason of the last.
    """
    return cpu_backend(isas, cache)[0]


def cpu_backend(isas: Iterable[Isa] | None = None, cache: Path | None = None) -> tuple[CpuOps, str, Isa]:
    """As `cpu_ops`, with a sentence that says why these, and what they are compiled for."""
    toolchain = find_toolchain()
    failures: dict[str, str] = {}
    failure = BuildError("no instruction set to compile for")
    with nullcontext(cache) if cache else usable_cache() as folder:
        for isa in available() if isas is None else isas:
            try:
                built = compiled(isa, toolchain, folder)
                return CpuOps(Library(built)), reason(built, toolchain, failures), isa
            except BuildError as error:
                failure = error
                failures[isa.name] = str(error)
                log.warning("%s cannot be compiled here: %s", isa.name, error)
    raise failure
