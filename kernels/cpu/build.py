"""Compiles the sources once per machine and keeps the library in the user's cache.

The file's name is a digest of everything that decides its contents: sources, flags, compiler,
torch and its OpenMP library. Processes that start together wait for the first one's lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch

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
TIMEOUT = 300.0  # seconds for one compiler run


class BuildError(Exception):
    """The library cannot be built here; one line says why."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler and the OpenMP library that torch has already loaded (there must be only one)."""

    compiler: str
    version: str
    openmp: Path


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled library. `digest` names its contents' inputs (64 hex digits)."""

    path: Path
    digest: str
    isa: Isa
    cached: bool = field(default=True, compare=False)  # it was there already


@contextmanager
def usable_cache() -> Iterator[Path]:
    """The user's cache; where none can be written, a private folder that goes away after loading."""
    try:
        folder = Path.home() / ".cache" / "agentserve" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        writable = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        writable = False
    if writable:
        yield folder
        return
    log.warning("no cache folder can be written: kernels are compiled at every start")
    with tempfile.TemporaryDirectory(prefix="agentserve-") as private:
        yield Path(private)


def find_toolchain(compilers: tuple[str, ...] = COMPILERS) -> Toolchain:
    """The first GCC of `compilers` on the path, or a `BuildError`."""
    openmp = _loaded_openmp()
    for name in compilers:
        path = shutil.which(name)
        if path is None:
            continue
        version = _run([path, "--version"]).splitlines()[0]
        if "clang" not in version:  # clang calls another OpenMP library than GCC and torch do
            return Toolchain(path, version, openmp)
    raise BuildError(f"no C++ compiler found ({' or '.join(compilers)} from GCC)")


def compiled(isa: Isa, toolchain: Toolchain, cache: Path) -> Built:
    """The library for `isa`, from `cache` or compiled into it. Raises `BuildError`."""
    digest = _digest(isa, toolchain)
    target = cache / f"{isa.name}-{digest[:32]}.so"
    built = Built(target, digest, isa)
    try:
        if target.exists():
            return built
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(isa, toolchain, target)
                built = replace(built, cached=False)
    except OSError as error:
        raise BuildError(f"{cache}: {error.strerror or error}") from None
    return built


def _compile(isa: Isa, toolchain: Toolchain, target: Path) -> None:
    log.info("compiling %s with %s (once, some seconds)", isa.name, toolchain.version)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        library = Path(folder) / "library.so"

        def compile_one(source: Path) -> str:
            part = str(Path(folder) / source.name) + ".o"
            _run([toolchain.compiler, *_flags(isa, source), "-c", str(source), "-o", part])
            return part

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the first error ends it
            parts = list(pool.map(compile_one, _slowest_first()))
        _run([toolchain.compiler, "-shared", *parts, str(toolchain.openmp), "-o", str(library)])
        os.replace(library, target)


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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took longer than {TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"{command[0]} failed: {first}")
    return done.stdout
