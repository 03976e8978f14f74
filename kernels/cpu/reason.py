"""Why a machine runs the build that it runs, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kernels.cpu.build import Built, Toolchain
from kernels.cpu.isa import BEST_FIRST, CPUINFO, Isa, cpu_flags

_VERSION = re.compile(r"\d+(\.\d+)+")


def reason(built: Built, toolchain: Toolchain, failures: Mapping[str, str], cpuinfo: Path = CPUINFO) -> str:
    """The build's name, what of this machine it uses, who compiled it, and why not a better one.

    `failures`: the better instruction sets that this machine has, with why they do not compile.
    """
    parts = [_has(built.isa), f"compiled by {_compiler(toolchain.version)}" + ", cached" * built.cached]
    parts += [f"{name} does not compile here: {error}" for name, error in failures.items()]
    missing = _missing(built.isa, cpu_flags(cpuinfo), failures)
    if missing is not None:
        parts.append(missing)
    return f"{built.isa.name} ({'; '.join(parts)})"


def _has(isa: Isa) -> str:
    """What of the processor tells this set from the lesser ones."""
    if not isa.needs:
        return "what every processor of this kind has"
    lesser: frozenset[str] = frozenset()
    if isa in BEST_FIRST:
        lesser = frozenset().union(*(other.needs for other in BEST_FIRST if other.needs < isa.needs))
    return f"this machine has {' '.join(sorted(isa.needs - lesser))}"


def _missing(isa: Isa, flags: frozenset[str], failures: Mapping[str, str]) -> str | None:
    """Why the next better set is no choice, if it is the processor's fault."""
    better = [other for other in BEST_FIRST if other.needs > isa.needs and other.name not in failures]
    if not better or not flags or better[-1].needs <= flags:
        return None
    return f"no {better[-1].name}, which needs {' '.join(sorted(better[-1].needs - flags))}"


def _compiler(version: str) -> str:
    """The name and number in a compiler's first line: "g++ (Debian 12.2.0-14) 12.2.0"."""
    name = version.split(maxsplit=1)[0] if version.split() else "a compiler"
    found = _VERSION.search(re.sub(r"\([^)]*\)", "", version))
    return f"{name} {found[0]}" if found else name
