"""Compiles the sources once per machine and keeps the library in the user's cache.

The file's name is a digest of everything that decides its contents: sources, flags, compiler,
torch and its OpenMP library.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from kernels.cpu.cache import FOLDER, intact, keep, locked, make_room
from kernels.cpu.compilers import BuildError, OutOfSpace, Runs
from kernels.cpu.isa import Isa

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
SLOWEST = ("products.cpp", "attention_f32.cpp", "decoding.cpp", "attention_bf16.cpp")
"""Sources that are compiled first, so that no processor ends up alone with one."""
COMPILERS = ("g++", "c++")
# No -ffast-math: sums must keep their order. No contraction: see vec.h. Lanes are read as uint32
# from buffers of uint16, which strict aliasing forbids. Loops are vectorised as at -O3; the rest of -O3
# costs seconds, and only products gain by it.
FLAGS = (
    "-std=c++20",
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
)
FLAGS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType({"products.cpp": ("-O3",)})


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler and the OpenMP library that torch has already loaded (there must be only one)."""

    compiler: str
    version: str
    openmp: Path


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled library. `digest` names its contents' inputs (64 hex digits).

    One that could not be kept lies in a folder of its own until `release`, after it is loaded.
    """

    path: Path
    digest: str
    isa: Isa
    cached: bool = field(default=True, compare=False)  # it was there already
    private: bool = field(default=False, compare=False)

    def release(self) -> None:
        if self.private:
            shutil.rmtree(self.path.parent, ignore_errors=True)


def find_toolchain(compilers: tuple[str, ...] = COMPILERS) -> Toolchain:
    """The first GCC of `compilers` on the path, or a `BuildError`."""
    openmp = _loaded_openmp()
    for name in compilers:
        path = shutil.which(name)
        if path is None:
            continue
        version = Runs()([path, "--version"]).splitlines()[0]
        if "clang" not in version:  # clang calls another OpenMP library than GCC and torch do
            return Toolchain(path, version, openmp)
    raise BuildError(f"no C++ compiler found ({' or '.join(compilers)} from GCC)")


def compiled(isa: Isa, toolchain: Toolchain, cache: Path, afresh: bool = False) -> Built:
    """The library for `isa`, from `cache` or compiled into it. Raises `BuildError`.

    `afresh`: the one in the cache does not load. The new one is loaded from where it was compiled,
    for the loader takes a path that it has seen for the library that it has seen there.
    """
    digest = _digest(isa, toolchain)
    target = cache / f"{isa.name}-{digest[:32]}.so"
    built = Built(target, digest, isa)
    if not afresh and intact(target):
        return built
    try:
        with locked(target.with_suffix(".lock")):
            if not afresh and intact(target):
                return built
            make_room(target)
            library = _compile_where_room_is(isa, toolchain, cache)
            kept = keep(library, target)
    except OSError as error:
        raise BuildError(f"{cache}: {error.strerror or error}") from None
    if afresh or not kept:
        return Built(library, digest, isa, cached=False, private=True)
    shutil.rmtree(library.parent, ignore_errors=True)
    return Built(target, digest, isa, cached=False)


def _compile_where_room_is(isa: Isa, toolchain: Toolchain, cache: Path) -> Path:
    """The library, in a folder of its own: among the system's temporary files, else in the cache."""
    log.info("compiling %s with %s (once, some seconds)", isa.name, toolchain.version)
    try:
        return _compile(isa, toolchain, None)
    except OutOfSpace:
        return _compile(isa, toolchain, cache)


def _compile(isa: Isa, toolchain: Toolchain, parent: Path | None) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=parent))
    except OSError as error:
        raise OutOfSpace(f"no folder to compile in: {error.strerror or error}") from None
    library, run = folder / "library.so", Runs(folder)

    def compile_one(source: Path) -> str:
        part = str(folder / source.name) + ".o"
        run([toolchain.compiler, *_flags(isa, source), "-c", str(source), "-o", part])
        return part

    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            try:
                parts = list(pool.map(compile_one, _slowest_first()))
            except BaseException:  # the first error, or an interrupt, ends them all
                run.stop()
                raise
        run([toolchain.compiler, "-shared", *parts, str(toolchain.openmp), "-o", str(library)])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return library


def _flags(isa: Isa, source: Path) -> Sequence[str]:
    return (*FLAGS, *FLAGS_OF.get(source.name, ()), *isa.flags)


def _slowest_first() -> Sequence[Path]:
    sources = {source.name: source for source in sorted(SOURCES.glob("*.cpp"))}
    first = [name for name in SLOWEST if name in sources]
    return [sources[name] for name in (*first, *sorted(sources.keys() - set(first)))]


def _digest(isa: Isa, toolchain: Toolchain) -> str:
    digest = hashlib.sha256()
    parts = [toolchain.version, torch.__version__, toolchain.openmp.name]
    for source in sorted(SOURCES.iterdir()):
        parts += [source.name, " ".join(_flags(isa, source)), source.read_text()]
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _loaded_openmp() -> Path:
    """The GNU OpenMP library in this process; torch brings its own."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        raise BuildError("only Linux is supported") from None
    found = {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "libgomp" in line}
    if len(found) != 1:
        raise BuildError(f"torch should have loaded one GNU OpenMP library, found {len(found)}")
    return found.pop()
