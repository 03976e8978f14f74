"""The parts of the check, each in a process of its own: one that fails or hangs does not stop the others."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from agentserve.bench.gpu import limits, paged, rowwise, timed, transfers, whole
from agentserve.bench.gpu.device import Device, find
from agentserve.bench.gpu.engine import engine
from agentserve.bench.gpu.result import Part
from agentserve.bench.gpu.sizes import Sizes, sizes_for
from agentserve.bench.gpu.timed import Limits
from kernels.ops import Ops
from kernels.triton.ops import TritonOps

UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Context:
    """What a part is given. `limits`: what the part of this name found; empty where it found nothing."""

    on: Device
    sizes: Sizes
    ops: Ops
    limits: Limits

    def needed(self) -> Limits:
        """The limits. ValueError where there are none: then nothing can be put beside them."""
        if not self.limits:
            raise ValueError("the device's limits were not measured")
        return self.limits


def _checked(name: str, dtype: torch.dtype) -> Callable[[Context], Part]:
    """Operations on rows, or on pages, in one dtype."""
    checks = rowwise.checks if name.startswith("rows") else paged.checks

    def run(at: Context) -> Part:
        if dtype not in at.sizes.dtypes:
            return Part(name, notes=["the interpreter has no products in it"])
        found, error = until_it_fails(checks(at.on, replace(at.sizes, dtypes=(dtype,)), at.ops))
        return Part(name, checks=found, error=error)

    return run


def _kernels(at: Context) -> Part:
    found, error = until_it_fails(timed.rows(at.on, at.sizes, at.ops, at.needed()))
    return Part("kernels", found, error=error)


def until_it_fails(found: Iterable[T]) -> tuple[list[T], str]:
    """What comes of it, and the error that ended it, if one did: that must not take the rest along."""
    kept: list[T] = []
    try:
        kept.extend(found)
    except Exception as error:
        traceback.print_exc()
        return kept, said(error)
    return kept, ""


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _compile_kernels(at: Context) -> Part:
    """What "kernels" times, run once."""
    on = replace(at.on, rehearsed=True)
    _, error = until_it_fails(timed.rows(on, at.sizes, at.ops, at.needed()))
    return Part("compile-kernels", error=error)


def _compile_model(at: Context) -> Part:
    """The engine of "model" and "agents", built once: that compiles all of its kernels."""
    engine(at.on, at.sizes, at.ops, whole.PRESSED_ROOM)
    return Part("compile-model")


@dataclass(frozen=True, slots=True)
class Task:
    """The most seconds that it may take, and what it does. Nothing is timed in parts that run `together`:
    most of what they take is compiling. `for_gpus`: there is nothing to do in the interpreter."""

    seconds: float
    run: Callable[[Context], Part]
    together: bool = False
    for_gpus: bool = False


_CHECKED = {
    f"{kind}-{name}": Task(85.0, _checked(f"{kind}-{name}", dtype), together=True)
    for kind in ("rows", "pages")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
}

# Triton keeps what it compiled on disk: the parts that are timed find it there, whatever else fails.
_COMPILED = {
    "compile-kernels": Task(85.0, _compile_kernels, together=True, for_gpus=True),
    "compile-model": Task(85.0, _compile_model, together=True, for_gpus=True),
}

PARTS: Mapping[str, Task] = {
    "limits": Task(20.0, lambda at: limits.measure(at.on, at.sizes)),
    **_CHECKED,
    **_COMPILED,
    "kernels": Task(55.0, _kernels),
    "transfers": Task(15.0, lambda at: transfers.measure(at.on, at.sizes)),
    "model": Task(70.0, lambda at: whole.model(at.on, at.sizes, at.ops, at.needed())),
    "agents": Task(55.0, lambda at: whole.agents(at.on, at.sizes, at.ops)),
}
"""By name, in their order. All of them: 5 minutes."""


def run(name: str, interpreted: bool, found: Part | None) -> Part:
    """One part in this process. found: what "limits" found."""
    began = time.monotonic()
    try:
        on = find(interpreted)
        known = {row.name: row.value * UNITS[row.unit] for row in found.rows} if found is not None else {}
        at = Context(on, sizes_for(on), TritonOps(on.device), known)
        if interpreted and PARTS[name].for_gpus:
            return Part(name, notes=["nothing is compiled for the interpreter"])
        with torch.inference_mode():
            part = PARTS[name].run(at)
    except Exception as error:  # told instead of raised: whoever reads the result sees where
        traceback.print_exc()
        part = Part(name, error=said(error))
    return msgspec.structs.replace(part, seconds=time.monotonic() - began)


def main() -> None:
    """`python -m agentserve.bench.gpu.parts NAME FOLDER [interpreter]`: writes NAME.json into FOLDER."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    known = folder / "limits.json"
    found = msgspec.json.decode(known.read_bytes(), type=Part) if known.exists() else None
    interpreted = "interpreter" in sys.argv[3:]
    if interpreted:
        torch.set_num_threads(1)  # its operations are too small for more
    part = run(name, interpreted, found)
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(part))


if __name__ == "__main__":
    main()
