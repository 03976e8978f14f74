"""Compiling kernels for GPUs that are not there: what each case needs, and whether it fits.

Triton brings NVIDIA's assembler, so registers, spills and shared memory can be read on any machine. Kernels
must have been declared for a GPU: a process that runs them in Triton's interpreter cannot compile them.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton import catalogue
from kernels.triton.launch import ALIGNMENT, FP_FUSION, Case
from kernels.triton.targets import TARGETS, occupancy

_THREADS = 32  # of a warp
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) .*?LOCAL:(?P<local>\d+)")


class Compiled(msgspec.Struct, frozen=True, omit_defaults=True):
    """A case on a target. Bytes are of one thread (`spilled`) or block (`shared`).

    `spilled` is all of a thread's local memory. `columns`: of tensor memory. `blocks` is how many one
    processor holds, and `bound` what bounds that. `error`: why it does not compile or fit; the figures
    mean nothing then.
    """

    case: str
    kernel: str
    capability: int
    decode: bool
    warps: int
    stages: int
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    columns: int = 0
    blocks: int = 0
    bound: str = ""
    error: str = ""

    @property
    def fault(self) -> str:
        """What is not allowed of it: an error, or spills in a decode step. Empty: nothing."""
        if self.error:
            return self.error
        if self.decode and self.spilled:
            return f"a decode kernel spills {self.spilled} bytes of each thread"
        return ""


def check_possible() -> None:
    """RuntimeError where kernels of this process were declared for Triton's interpreter."""
    if knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET is set: unset it")


def check_declared(case: Case) -> None:
    """ValueError where a case does not name its kernel's arguments, each once, or where numbers that Triton
    would specialise are among those that are not constant."""
    names = list(case.kernel.arg_names)
    given = [*case.signature, *case.constants, *case.choice.tiles]
    if sorted(names) != sorted(given):
        odd = sorted(set(names) ^ set(given)) or sorted({name for name in given if given.count(name) > 1})
        raise ValueError(f"arguments that are missing, unknown or named twice: {', '.join(odd)}")
    for param in case.kernel.params:
        kind = case.signature.get(param.name, "")
        if kind.startswith(("i", "u")) and not param.do_not_specialize:
            raise ValueError(f"{param.name} is a number that Triton specialises: name it in kernel(...)")


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile for one target. What goes wrong is told in `error`."""
    base = Compiled(
        case.name, catalogue.kernel_name(case), capability, case.decode, case.choice.warps, case.choice.stages
    )
    try:
        check_declared(case)
        built = triton.compile(
            _source(case),
            target=GPUTarget("cuda", capability, _THREADS),
            options={
                "num_warps": case.choice.warps,
                "num_stages": case.choice.stages,
                "enable_fp_fusion": FP_FUSION,
            },
        )
        registers, spilled = _usage(built.asm["cubin"])
    except Exception as error:  # Triton's compiler raises whatever its passes raise
        return msgspec.structs.replace(base, error=_line(error))
    shared, columns, target = built.metadata.shared, built.metadata.tmem_size, TARGETS[capability]
    # The compiler may add warps (those that load, of a kernel whose warps are specialised).
    room = occupancy(target, built.metadata.num_warps, registers, shared, columns)
    large = "" if room.blocks else f"one block is too large: {room.bound} of {target.name}"
    return msgspec.structs.replace(
        base,
        registers=registers,
        spilled=spilled,
        shared=shared,
        columns=columns,
        blocks=room.blocks,
        bound=room.bound,
        error=large,
    )


def compile_all(
    capabilities: Sequence[int] = tuple(TARGETS),
    names: Sequence[str] | None = None,
    modules: Sequence[str] = catalogue.MODULES,
    processes: int = 1,
    told: Callable[[Compiled], None] = lambda _: None,
) -> list[Compiled]:
    """Every case of `modules` (or those in `names`) on every target, by case, then target.

    `told` hears of each as it is done. Compiles in `processes` of their own. ValueError for an unknown name,
    RuntimeError where `check_possible` has one.
    """
    check_possible()
    known = catalogue.cases(capabilities[0], modules) if capabilities else {}
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"no case is called {', '.join(unknown)}")
    jobs = [
        (tuple(modules), name, capability)
        for name in (known if names is None else names)
        for capability in capabilities
    ]
    return list(_telling(_run(jobs, processes), told))


def _telling(found: Iterator[Compiled], told: Callable[[Compiled], None]) -> Iterator[Compiled]:
    for one in found:
        told(one)
        yield one


_Job = tuple[tuple[str, ...], str, int]


def _run(jobs: Sequence[_Job], processes: int) -> Iterator[Compiled]:
    if processes <= 1:
        yield from map(_compile, jobs)
        return
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=fresh) as pool:
        yield from pool.map(_compile, jobs)


def _compile(job: _Job) -> Compiled:
    modules, name, capability = job
    return compile_case(_known(modules, capability)[name], capability)


@functools.cache
def _known(modules: tuple[str, ...], capability: int) -> Mapping[str, Case]:
    return catalogue.cases(capability, modules)


def _source(case: Case) -> ASTSource:
    constants = {**case.constants, **case.choice.tiles}
    names = list(case.kernel.arg_names)
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", ALIGNMENT]]
        for name, kind in case.signature.items()
        if kind.startswith("*")
    }
    return ASTSource(case.kernel, signature, constants, aligned)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _USAGE.search(said)
    if found is None:
        raise ValueError("cuobjdump tells no resource usage")
    return int(found["registers"]), int(found["stack"]) + int(found["local"])


def _line(error: Exception) -> str:
    """What went wrong in one line: the last one of Triton's that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no word of why'}"[:300]
