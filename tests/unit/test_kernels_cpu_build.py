"""Compiling: once, into a cache that knows its inputs; without a compiler the reference serves."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kernels.cpu
import kernels.cpu.build
from kernels import ops_for
from kernels.cpu import BuildError, cpu_ops
from kernels.cpu.build import Built, OutOfSpace, Toolchain, compiled, find_toolchain, usable_cache
from kernels.cpu.isa import AVX2, AVX512, AVX512BF16, AVX512VNNI, PLAIN, Isa, available, cpu_flags


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    try:
        return find_toolchain()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A single small source in place of the real ones."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    source = folder / "api.cpp"
    source.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
    monkeypatch.setattr(kernels.cpu.build, "SOURCES", folder)
    return source


def counted(folder: Path, toolchain: Toolchain, after: str = "") -> tuple[Toolchain, Callable[[], int]]:
    """A compiler that notes each of its runs, and how many there were."""
    notes, script = folder / "runs", folder / "compiler"
    script.write_text(f'#!/bin/sh\necho run >> "{notes}"\n{after}\nexec "{toolchain.compiler}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return (
        Toolchain(str(script), toolchain.version, toolchain.openmp),
        lambda: len(notes.read_text().split()) if notes.exists() else 0,
    )


def test_compiles_once_and_again_when_an_input_changes(
    tmp_path: Path, toolchain: Toolchain, one_source: Path
) -> None:
    compiler, runs = counted(tmp_path, toolchain)
    first = compiled(PLAIN, compiler, tmp_path / "cache")
    assert compiled(PLAIN, compiler, tmp_path / "cache") == first
    assert runs() == 2  # compile and link
    other = compiled(Isa("cpu-plain", ("-O1",)), compiler, tmp_path / "cache")
    one_source.write_text(one_source.read_text().replace("42", "43"))
    changed = compiled(PLAIN, compiler, tmp_path / "cache")
    newer = compiled(PLAIN, Toolchain(compiler.compiler, "g++ 99", toolchain.openmp), tmp_path / "cache")
    paths = {built.path for built in (first, other, changed, newer)}
    assert len(paths) == 4
    assert all(path.exists() for path in paths)


def test_sources_are_compiled_apart_and_fail_together(
    tmp_path: Path, toolchain: Toolchain, one_source: Path
) -> None:
    """Each by itself, then one library; an error in any leaves none, and is one line."""
    other = one_source.with_name("other.cpp")
    other.write_text('extern "C" __attribute__((visibility("default"))) int other() { return 7; }\n')
    compiler, runs = counted(tmp_path, toolchain)
    library = ctypes.CDLL(str(compiled(PLAIN, compiler, tmp_path / "cache").path))
    assert runs() == 3
    assert (library.answer(), library.other()) == (42, 7)
    other.write_text("neither is this\n")
    with pytest.raises(BuildError, match=r"failed: .*other\.cpp.*error") as error:
        compiled(PLAIN, toolchain, tmp_path / "new")
    assert "\n" not in str(error.value)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".lock"]


def test_flags_of_one_source_count(
    tmp_path: Path, toolchain: Toolchain, one_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(PLAIN, toolchain, tmp_path)
    monkeypatch.setattr(kernels.cpu.build, "FLAGS_OF", {"api.cpp": ("-O1",)})
    assert compiled(PLAIN, toolchain, tmp_path).digest != first.digest
    monkeypatch.setattr(kernels.cpu.build, "FLAGS_OF", {"other.cpp": ("-O1",)})
    assert compiled(PLAIN, toolchain, tmp_path) == first


def test_every_source_with_a_place_or_flags_exists() -> None:
    names = {path.name for path in kernels.cpu.build.SOURCES.glob("*.cpp")}
    assert names >= {*kernels.cpu.build.SLOWEST, *kernels.cpu.build.FLAGS_OF}


def test_two_processes_at_once_compile_once(tmp_path: Path, toolchain: Toolchain, one_source: Path) -> None:
    """Both start on an empty cache; the second waits for the first and finds its library."""
    compiler, runs = counted(tmp_path, toolchain, after="sleep 0.3")
    program = (
        "import sys, torch\nfrom pathlib import Path\n"
        "from kernels.cpu import build\nfrom kernels.cpu.build import Toolchain, compiled\n"
        f"from kernels.cpu.isa import Isa\nbuild.SOURCES = Path({str(one_source.parent)!r})\n"
        f"tools = Toolchain({compiler.compiler!r}, 'g++', Path({str(toolchain.openmp)!r}))\n"
        f"print(compiled(Isa('cpu-quick', ('-O0',)), tools, Path({str(tmp_path / 'cache')!r})).path)\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = {process.communicate(timeout=240)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert len(answers) == 1
    assert Path(answers.pop().strip()).exists()
    assert runs() == 2


def test_a_failing_compiler_is_named_and_leaves_nothing(
    tmp_path: Path, toolchain: Toolchain, one_source: Path
) -> None:
    one_source.write_text("this is not C++\n")
    with pytest.raises(BuildError, match=r"failed: .*error"):
        compiled(PLAIN, toolchain, tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_an_unusable_cache_is_an_error(tmp_path: Path, toolchain: Toolchain, one_source: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="file"):
        compiled(PLAIN, toolchain, tmp_path / "file" / "cache")


def test_without_a_home_a_private_folder_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".cache").write_text("a file where a folder should be")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with usable_cache() as folder:
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    assert "compiled at every start" in caplog.text
    (tmp_path / ".cache").unlink()
    with usable_cache() as folder:
        assert folder == tmp_path / ".cache" / "agentserve" / "kernels"
    assert folder.is_dir()


def test_the_next_instruction_set_is_tried(
    tmp_path: Path, toolchain: Toolchain, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = Isa("cpu-unknown", ("-mno-such-thing",))
    assert cpu_ops([unknown, PLAIN]).name == "cpu-plain"
    assert "cpu-unknown cannot be compiled here" in caplog.text


def test_without_a_compiler_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing() -> Toolchain:
        return find_toolchain(("no-such-compiler",))

    monkeypatch.setattr(kernels.cpu, "find_toolchain", nothing)
    with caplog.at_level(logging.WARNING):
        assert ops_for(torch.device("cpu")).name == "reference"
    (line,) = caplog.messages
    assert "no C++ compiler found (no-such-compiler from GCC)" in line


def test_there_is_one_openmp_library_and_no_thread_of_our_own(toolchain: Toolchain) -> None:
    program = (
        "import torch, os\nfrom kernels.cpu import cpu_ops\ntorch.set_num_threads(2)\n"
        "x, w = torch.randn(64, 64), torch.randn(4096, 64)\n"
        "torch.nn.functional.linear(torch.randn(512, 512), torch.randn(512, 512)).exp_()\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "cpu_ops().linear(w)(x)\n"
        "maps = open('/proc/self/maps').read().splitlines()\n"
        "after = len(os.listdir('/proc/self/task'))\n"
        "print(before, after, len({m.split()[-1] for m in maps if 'libgomp' in m}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after, libraries = map(int, done.stdout.split())
    assert after == before
    assert libraries == 1


def test_instruction_sets_by_cpu_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    def names(flags: str) -> list[str]:
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
        return [isa.name for isa in available(info)]

    wide = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq"
    best = [isa.name for isa in (AVX512BF16, AVX512VNNI, AVX512, AVX2, PLAIN)]
    assert names(wide + " avx512_vnni avx512_bf16") == best
    assert names(wide + " avx512_vnni") == best[1:]
    assert names(wide + " avx512_bf16") == best[2:], "it is compiled for both"
    assert names(wide) == ["cpu-avx512", "cpu-avx2", "cpu-plain"]
    assert names("avx2 fma f16c avx512f") == ["cpu-avx2", "cpu-plain"]
    assert names("sse2") == ["cpu-plain"]
    assert cpu_flags(tmp_path / "nothing") == frozenset()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert names(wide) == ["cpu-plain"]


def _cut(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:4096])


def _flip(library: Path) -> None:
    contents = library.read_bytes()
    library.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_cut, id="cut short"),
        pytest.param(lambda library: library.write_bytes(b""), id="empty"),
        pytest.param(lambda library: library.write_bytes(b"garbage" * 1000), id="garbage"),
        pytest.param(_flip, id="one bit"),
        pytest.param(lambda library: library.with_name(library.name + ".sha256").unlink(), id="no digest"),
        pytest.param(
            lambda library: library.with_name(library.name + ".sha256").write_bytes(b"\xff\n"),
            id="bad digest",
        ),
    ],
)
def test_a_damaged_library_is_compiled_again(
    tmp_path: Path, toolchain: Toolchain, one_source: Path, damage: Callable[[Path], None]
) -> None:
    compiler, runs = counted(tmp_path, toolchain)
    first = compiled(PLAIN, compiler, tmp_path / "cache")
    damage(first.path)
    again = compiled(PLAIN, compiler, tmp_path / "cache")
    assert (runs(), again, again.cached) == (4, first, False)
    assert ctypes.CDLL(str(again.path)).answer() == 42
    assert compiled(PLAIN, compiler, tmp_path / "cache").cached


class Loader:
    """Stands in for `Library`: refuses the first libraries, each while its file is still there."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.seen = list(errors), list[Built]()

    def __call__(self, built: Built) -> Loader:
        assert built.path.is_file()
        self.built = built
        self.seen.append(built)
        if self.errors:
            raise self.errors.pop(0)
        return self


@pytest.mark.parametrize("error", [OSError("file too short"), AttributeError("undefined symbol: x")])
def test_what_does_not_load_is_compiled_once_more(
    tmp_path: Path,
    toolchain: Toolchain,
    one_source: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """And loaded by another path: the loader remembers what it has seen by the first."""
    compiler, runs = counted(tmp_path, toolchain)
    monkeypatch.setattr(kernels.cpu, "find_toolchain", lambda: compiler)
    monkeypatch.setattr(kernels.cpu, "CpuOps", lambda library: library)
    loader = Loader(error)
    monkeypatch.setattr(kernels.cpu, "Library", loader)
    cpu_ops([PLAIN], tmp_path / "cache")
    first, second = loader.seen
    assert runs() == 4
    assert first.path != second.path
    assert not second.path.parent.exists()
    assert compiled(PLAIN, compiler, tmp_path / "cache").cached

    loader = Loader(error, type(error)("still\nnot"))
    monkeypatch.setattr(kernels.cpu, "Library", loader)
    with pytest.raises(BuildError, match="does not load: still not") as failure:
        cpu_ops([PLAIN], tmp_path / "cache")
    assert str(loader.seen[-1].path) in str(failure.value)
    assert not loader.seen[-1].path.exists()


def test_a_library_without_our_functions_is_an_error(
    tmp_path: Path, toolchain: Toolchain, one_source: Path
) -> None:
    with pytest.raises(BuildError, match=r"library\.so does not load: .*agentserve_") as error:
        cpu_ops([PLAIN], tmp_path / "cache")
    assert "\n" not in str(error.value)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, of this test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_with_a_full_cache_the_library_is_loaded_from_where_it_was_compiled(
    tmp_path: Path,
    toolchain: Toolchain,
    one_source: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    built = compiled(PLAIN, toolchain, tmp_path / "cache")
    assert ctypes.CDLL(str(built.path)).answer() == 42
    assert built.path.is_relative_to(temporary)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    (line,) = caplog.messages
    assert "cannot be kept (No space left on device)" in line
    built.release()
    assert list(temporary.iterdir()) == []


def test_where_temporary_files_have_no_room_the_cache_may(
    tmp_path: Path, toolchain: Toolchain, one_source: Path, temporary: Path
) -> None:
    full = 'echo "x.s: Fatal error: cannot write: No space left on device" >&2; exit 1'
    after = f'case "$TMPDIR" in {temporary}/*) {full};; esac'
    compiler, _ = counted(tmp_path, toolchain, after)
    built = compiled(PLAIN, compiler, tmp_path / "cache")
    assert ctypes.CDLL(str(built.path)).answer() == 42
    assert list(temporary.iterdir()) == []
    names = {path.name.removeprefix(built.path.stem) for path in (tmp_path / "cache").iterdir()}
    assert names == {".so", ".so.sha256", ".lock"}


def test_no_room_at_all_is_no_reason_for_a_lesser_instruction_set(
    tmp_path: Path, toolchain: Toolchain, one_source: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = "echo \"x.s: Assembler messages:\nx.s: error: 'No space left on device' in $@\" >&2; exit 1"
    compiler, runs = counted(tmp_path, toolchain, messages)
    monkeypatch.setattr(kernels.cpu, "find_toolchain", lambda: compiler)
    with pytest.raises(OutOfSpace) as error:
        cpu_ops([AVX2, PLAIN], tmp_path / "cache")
    assert str(error.value) == f"{compiler.compiler} failed: No space left on device"
    assert runs() == 2  # among temporary files and in the cache
    assert list(temporary.iterdir()) == []


def test_long_messages_are_cut(tmp_path: Path, toolchain: Toolchain, one_source: Path) -> None:
    compiler, _ = counted(tmp_path, toolchain, f'echo "error: {"x" * 5000}" >&2; exit 1')
    with pytest.raises(BuildError, match="failed: error: xxx") as error:
        compiled(PLAIN, compiler, tmp_path / "cache")
    assert len(str(error.value)) < len(compiler.compiler) + 300


def _is_gone(pid: int) -> bool:
    """Whether the process has ended; nobody may have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_until(true: Callable[[], bool]) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    pytest.fail("it does not happen")


def test_a_compiler_that_takes_too_long_ends_with_its_children(
    tmp_path: Path, toolchain: Toolchain, one_source: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    compiler, _ = counted(tmp_path, toolchain, f'sleep 600 & echo $! > "{child}"; wait')
    monkeypatch.setattr(kernels.cpu.build, "TIMEOUT", 1.0)
    with pytest.raises(BuildError, match="took longer than 1 s"):
        compiled(PLAIN, compiler, tmp_path / "cache")
    _wait_until(lambda: _is_gone(int(child.read_text())))
    assert list(temporary.iterdir()) == []


def test_one_error_ends_the_other_compilers(
    tmp_path: Path, toolchain: Toolchain, one_source: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second source's run never ends by itself; the first fails once that has begun."""
    child = tmp_path / "child"
    one_source.with_name("late.cpp").write_text("")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    wait = f'sleep 600 & echo $! > "{child}.new"; mv "{child}.new" "{child}"; wait'
    fail = f'while ! test -e "{child}"; do sleep 0.01; done; echo "an error" >&2; exit 1'
    compiler, _ = counted(tmp_path, toolchain, f'case "$*" in *late.cpp*) {wait};; *) {fail};; esac')
    with pytest.raises(BuildError, match="an error"):
        compiled(PLAIN, compiler, tmp_path / "cache")
    _wait_until(lambda: _is_gone(int(child.read_text())))
    assert list(temporary.iterdir()) == []


def test_what_killed_processes_and_old_versions_left_is_removed(
    tmp_path: Path, toolchain: Toolchain, one_source: Path, temporary: Path
) -> None:
    cache, now = tmp_path / "cache", time.time()
    cache.mkdir()

    def left(path: Path, days: float, used: float | None = None) -> Path:
        if path.suffix:
            path.write_text("x")
        else:
            path.mkdir()
            (path / "part.o").write_text("x")
        os.utime(path, (now - 86400 * (days if used is None else used), now - 86400 * days))
        return path

    gone = [
        left(cache / "tmpabcd", 2),
        left(cache / "agentserve-build-abcd", 2),
        left(temporary / "agentserve-build-abcd", 2),
        left(cache / f"cpu-avx2-{'0' * 32}.so", 31),
        left(cache / f"cpu-avx2-{'0' * 32}.so.sha256", 31),
    ]
    stays = [
        left(cache / "agentserve-build-now", 0.5),
        left(cache / "mine", 99),
        left(cache / "mine.so", 99),
        left(temporary / "tmpother", 99),
        left(cache / f"cpu-avx2-{'1' * 32}.so", 99, used=29),
        left(cache / f"cpu-avx2-{'2' * 32}.so", 29),
    ]
    built = compiled(PLAIN, toolchain, cache)
    assert [path for path in gone if path.exists()] == []
    assert [path for path in stays if not path.exists()] == []
    os.utime(built.path, (now - 86400 * 99, now - 86400 * 99))
    assert compiled(PLAIN, toolchain, cache).cached
    assert built.path.stat().st_mtime > now - 86400, "a library in use is not old"
