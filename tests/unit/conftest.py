"""Fixtures of the tests of compiling: small sources, compilers and folders of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import kernels.cpu.build
from kernels.cpu.build import Toolchain
from tests.cpu_builds import compiler


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    return compiler()


@pytest.fixture
def one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A single small source in place of the real ones."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    source = folder / "api.cpp"
    source.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
    monkeypatch.setattr(kernels.cpu.build, "SOURCES", folder)
    return source


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, of this test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
