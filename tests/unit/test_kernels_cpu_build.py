"""Compiling: once, into a cache that knows its inputs; without a compiler the reference serves."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kernels.cpu
import kernels.cpu.build
import kernels.cpu.compilers
from kernels import ops_for
from kernels.cpu import BuildError, cpu_ops
from kernels.cpu.build import Toolchain, compiled, find_toolchain
from kernels.cpu.compilers import OutOfSpace
from kernels.cpu.isa import AVX2, AVX512, AVX512BF16, AVX512VNNI, PLAIN, Isa, available, cpu_flags
from tests.cpu_builds import counted


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
    monkeypatch.setattr(kernels.cpu.compilers, "TIMEOUT", 1.0)
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
