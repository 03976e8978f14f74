"""The instruction sets that the sources are compiled for, and which of them this machine has."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Isa:
    """One way to compile. `needs` are flags of /proc/cpuinfo; `name` is what the backend shows."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}

_AVX512VNNI = (*_AVX512, "-mavx512vnni")
_HAS_AVX512VNNI = _HAS_AVX512 | {"avx512_vnni"}

# Every machine with bfloat16 products has the 8-bit ones.
AVX512BF16 = Isa("cpu-avx512bf16", (*_AVX512VNNI, "-mavx512bf16"), _HAS_AVX512VNNI | {"avx512_bf16"})
AVX512VNNI = Isa("cpu-avx512vnni", _AVX512VNNI, _HAS_AVX512VNNI)
AVX512 = Isa("cpu-avx512", _AVX512, _HAS_AVX512)
AVX2 = Isa("cpu-avx2", _AVX2, _HAS_AVX2)
PLAIN = Isa("cpu-plain", ())
"""What the compiler takes for granted on this architecture: NEON on ARM, SSE2 on x86-64."""


BEST_FIRST = (AVX512BF16, AVX512VNNI, AVX512, AVX2)
"""What only some machines have."""

CPUINFO = Path("/proc/cpuinfo")


def available(cpuinfo: Path = CPUINFO) -> Iterator[Isa]:
    """The instruction sets of this machine, best first."""
    found = cpu_flags(cpuinfo) if platform.machine() in ("x86_64", "AMD64") else frozenset()
    for isa in BEST_FIRST:
        if isa.needs <= found:
            yield isa
    yield PLAIN


def cpu_flags(cpuinfo: Path = CPUINFO, label: str = "flags") -> frozenset[str]:
    """Feature flags of the first processor; none where the file cannot be read. `label` is what the
    machine calls them: Intel and AMD "flags", ARM "Features"."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == label:
            return frozenset(value.split())
    return frozenset()
