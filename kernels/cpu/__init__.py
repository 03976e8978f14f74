"""The CPU backend: the whole forward pass in C++, compiled on the machine that runs it.

Compilation happens at first use, before a worker is ready (`build`), and is kept (`cache`). `csrc/` is
written once for every instruction set (`isa`); `NOTES.md` says what was measured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from kernels.cpu.build import Toolchain, compiled, find_toolchain
from kernels.cpu.cache import usable_cache
from kernels.cpu.compilers import BuildError, OutOfSpace
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
                library = _loaded(isa, toolchain, folder)
                return CpuOps(library), reason(library.built, toolchain, failures), isa
            except OutOfSpace:  # a lesser instruction set would be no smaller
                raise
            except BuildError as error:
                failure = error
                failures[isa.name] = str(error)
                log.warning("%s cannot be compiled here: %s", isa.name, error)
    raise failure


def _loaded(isa: Isa, toolchain: Toolchain, cache: Path) -> Library:
    """The library, compiled once more if the one in the cache does not load. Raises `BuildError`."""
    failure = BuildError("nothing was loaded")
    for afresh in (False, True):
        built = compiled(isa, toolchain, cache, afresh)
        try:
            return Library(built)
        except (OSError, AttributeError) as error:  # no library, or one without our functions
            failure = BuildError(f"{built.path} does not load: {' '.join(str(error).split())}")
        finally:
            built.release()
    raise failure
