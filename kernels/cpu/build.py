"""Compiles the sources once per machine and keeps the library in the user's cache.

The file's name is a digest of everything that decides its contents: sources, flags, compiler,
torch and its OpenMP library. Processes that start together wait for the first one's lock. A library
is loaded only if it is what was compiled, which the SHA-256 beside it tells: loading half a file kills.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
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
MESSAGE = 240  # characters of a compiler's message that are shown
FULL = (errno.ENOSPC, errno.EDQUOT)
DAY = 24 * 3600.0
UNUSED = 30 * DAY  # seconds after which another library is removed
_FOLDER = "agentserve-build-"
_LEFT = (_FOLDER, "tmp")  # how folders begin that a killed process leaves; "tmp": of earlier versions
_LIBRARY = re.compile(r"cpu-[\w-]+-[0-9a-f]{32}\.so")


class BuildError(Exception):
    """The library cannot be built here; one line says why."""


class OutOfSpace(BuildError):
    """No room to compile in, which holds for every instruction set."""


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
        version = _Runs()([path, "--version"]).splitlines()[0]
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
    if not afresh and _intact(target):
        return built
    try:
        with _locked(target.with_suffix(".lock")):
            if not afresh and _intact(target):
                return built
            _make_room(target)
            library = _compile_where_room_is(isa, toolchain, cache)
            kept = _keep(library, target)
    except OSError as error:
        raise BuildError(f"{cache}: {error.strerror or error}") from None
    if afresh or not kept:
        return Built(library, digest, isa, cached=False, private=True)
    shutil.rmtree(library.parent, ignore_errors=True)
    return Built(target, digest, isa, cached=False)


def _digest_file(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _identity(library: Path) -> str:
    contents = library.read_bytes()
    return f"{len(contents)} {hashlib.sha256(contents).hexdigest()}\n"


def _intact(target: Path) -> bool:
    """Whether the library is there, whole, and the one that was kept; notes that it is in use."""
    try:
        expected = _digest_file(target).read_bytes().decode("ascii", "replace")
        if not target.is_file() or not expected.startswith(f"{target.stat().st_size} "):
            return False
        if _identity(target) != expected:
            return False
    except OSError:
        return False
    with suppress(OSError):
        os.utime(target)
    return True


def _keep(library: Path, target: Path) -> bool:
    """Copies a new library into the cache, its digest first; whether that worked."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_FOLDER) as folder:
            copy, identity = Path(folder) / "library.so", Path(folder) / "identity"
            shutil.copyfile(library, copy)
            identity.write_text(_identity(library))
            for path in (copy, identity):  # on the disk before it has its name
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(identity, _digest_file(target))
            os.replace(copy, target)
    except OSError as error:
        reason = error.strerror or error
        log.warning("%s cannot be kept (%s): it is compiled at every start", target, reason)
        return False
    return True


def _make_room(target: Path) -> None:
    """Removes the library that is not what it should be, and what nobody uses any more."""
    if target.exists():
        log.warning("%s is damaged or does not load: it is compiled again", target)
    for path in (target, _digest_file(target)):
        with suppress(OSError):
            path.unlink()
    now = time.time()
    with suppress(OSError):
        for path in target.parent.iterdir():
            with suppress(OSError):
                _remove_if_old(path, now)
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(_FOLDER + "*"):
            with suppress(OSError):
                _remove_if_old(path, now)


def _remove_if_old(path: Path, now: float) -> None:
    status = path.lstat()
    if status.st_uid != os.getuid():
        return
    if path.is_dir() and path.name.startswith(_LEFT) and now - status.st_mtime > DAY:
        shutil.rmtree(path, ignore_errors=True)
    elif _LIBRARY.fullmatch(path.name) and now - max(status.st_atime, status.st_mtime) > UNUSED:
        path.unlink()
        _digest_file(path).unlink(missing_ok=True)


def _compile_where_room_is(isa: Isa, toolchain: Toolchain, cache: Path) -> Path:
    """The library, in a folder of its own: among the system's temporary files, else in the cache."""
    log.info("compiling %s with %s (once, some seconds)", isa.name, toolchain.version)
    try:
        return _compile(isa, toolchain, None)
    except OutOfSpace:
        return _compile(isa, toolchain, cache)


def _compile(isa: Isa, toolchain: Toolchain, parent: Path | None) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
    except OSError as error:
        raise OutOfSpace(f"no folder to compile in: {error.strerror or error}") from None
    library, run = folder / "library.so", _Runs(folder)

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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock; a full disk that has no room for one is no reason not to compile."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in FULL:
                raise
        yield


class _Runs:
    """Runs commands, each in a session of its own, so that its children end with it.

    Their temporary files go to `folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._environment = {**os.environ, "LC_ALL": "C"}
        if folder is not None:
            self._environment["TMPDIR"] = str(folder)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def __call__(self, command: list[str]) -> str:
        """What the command writes. Raises `BuildError` if it fails or takes too long."""
        process = self._start(command)
        try:
            written, errors = process.communicate(timeout=TIMEOUT)
        except BaseException as error:
            _kill(process)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} took longer than {TIMEOUT:.0f} s") from None
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            raise _failure(command[0], errors or written)
        return written

    def stop(self) -> None:
        """Ends those that run; none starts any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill(process)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._stopped:
                raise BuildError(f"{command[0]} was stopped")
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise BuildError(f"{command[0]}: {error.strerror or error}") from None
            self._running.add(process)
            return process


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:  # not waited for yet: its number is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _failure(command: str, message: str) -> BuildError:
    for code in FULL:
        if os.strerror(code) in message:  # an assembler repeats it for every file
            return OutOfSpace(f"{command} failed: {os.strerror(code)}")
    lines = message.strip().splitlines()
    first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
    return BuildError(f"{command} failed: {first if len(first) <= MESSAGE else first[:MESSAGE] + '…'}")
