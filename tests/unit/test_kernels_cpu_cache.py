"""Compiled libraries are kept whole or not at all, and go when nobody uses them."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kernels.cpu
from kernels.cpu import BuildError, cpu_ops
from kernels.cpu.build import Built, Toolchain, compiled
from kernels.cpu.cache import usable_cache
from kernels.cpu.isa import PLAIN
from tests.cpu_builds import counted


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
