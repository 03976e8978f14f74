"""Why a machine runs the build that it runs: each reason, and none that is not so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kernels.cpu
from kernels import backend_for
from kernels.cpu import BuildError
from kernels.cpu.build import Built, Toolchain
from kernels.cpu.isa import AVX2, AVX512, AVX512BF16, BEST_FIRST, PLAIN, Isa
from kernels.cpu.reason import reason
from tests.cpu_builds import compiler

DEBIAN = "g++ (Debian 12.2.0-14) 12.2.0"


def sentence(
    tmp_path: Path,
    isa: Isa,
    flags: frozenset[str],
    failures: dict[str, str] | None = None,
    version: str = DEBIAN,
    cached: bool = True,
) -> str:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nflags : {' '.join(sorted(flags))}\n")
    built = Built(tmp_path / "x.so", "0" * 64, isa, cached)
    return reason(built, Toolchain("/usr/bin/g++", version, tmp_path), failures or {}, info)


def test_the_best_build_names_what_it_uses(tmp_path: Path) -> None:
    found = sentence(tmp_path, AVX512BF16, AVX512BF16.needs)
    assert found.startswith("cpu-avx512bf16 (this machine has avx512_bf16")
    assert found.endswith("; compiled by g++ 12.2.0, cached)")
    fresh = sentence(tmp_path, AVX512BF16, AVX512BF16.needs, cached=False)
    assert fresh.endswith("; compiled by g++ 12.2.0)")


def test_what_the_processor_lacks(tmp_path: Path) -> None:
    found = sentence(tmp_path, AVX2, AVX2.needs | {"sse2"})
    assert found.startswith("cpu-avx2 (this machine has avx2 f16c fma; compiled by")
    nearest = min((isa for isa in BEST_FIRST if isa.needs > AVX2.needs), key=lambda isa: len(isa.needs))
    assert found.endswith(f"; no {nearest.name}, which needs {' '.join(sorted(nearest.needs - AVX2.needs))})")
    plain = sentence(tmp_path, PLAIN, frozenset({"sse2", "fma"}))
    assert plain.startswith("cpu-plain (what every processor of this kind has; ")
    assert plain.endswith("; no cpu-avx2, which needs avx2 f16c)")


def test_what_the_compiler_refused(tmp_path: Path) -> None:
    failures = {isa.name: "g++ failed: error: what is that" for isa in BEST_FIRST if isa.needs > AVX512.needs}
    found = sentence(tmp_path, AVX512, AVX512BF16.needs, failures)
    assert "; cpu-avx512bf16 does not compile here: g++ failed: error: what is that" in found
    assert "; no " not in found, "the processor is not to blame"


def test_a_machine_without_these_flags(tmp_path: Path) -> None:
    """ARM: nothing is missing, for nothing better is meant for it."""
    found = sentence(tmp_path, PLAIN, frozenset())
    assert found == "cpu-plain (what every processor of this kind has; compiled by g++ 12.2.0, cached)"


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("g++ (Ubuntu 13.2.0-23ubuntu4) 13.2.0", "g++ 13.2.0"),
        ("c++ (GCC) 14.2.1 20240912 (Red Hat 14.2.1-3)", "c++ 14.2.1"),
        ("strange", "strange"),
        ("", "a compiler"),
    ],
)
def test_compilers(version: str, shown: str, tmp_path: Path) -> None:
    assert f"; compiled by {shown}, cached" in sentence(tmp_path, PLAIN, frozenset(), version=version)


def test_this_machine() -> None:
    compiler()
    ops, text, isa = kernels.cpu.cpu_backend()
    assert text.startswith(f"{ops.name} (")
    assert ops.name == isa.name
    backend = backend_for(torch.device("cpu"))
    assert backend.ops.name == ops.name
    assert backend.features == isa.needs


def test_other_devices_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(kernels.cpu, "cpu_backend", fails)
    backend = backend_for(torch.device("cpu"))
    assert (backend.ops.name, backend.features) == ("reference", frozenset())
    assert backend.reason == "reference, several times slower: no C++ compiler found"
    meta = backend_for(torch.device("meta"))
    assert meta.reason == "reference (there are no kernels for meta)"
