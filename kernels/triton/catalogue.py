"""Which modules hold kernels, and every case of theirs to compile ahead of time."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence

from kernels.triton.launch import Case

MODULES: tuple[str, ...] = (
    "kernels.triton.norms",
    "kernels.triton.heads",
    "kernels.triton.pages",
    "kernels.triton.attention",
    "kernels.triton.plain_products",
    "kernels.triton.block_products",
    "kernels.triton.embedding",
    "kernels.triton.narrow_products",
    "kernels.triton.sampling",
)
"""Each has `cases() -> Iterable[Case]`, those of `BY_TARGET` `cases(capability)`."""

BY_TARGET = frozenset({"kernels.triton.narrow_products"})
"""Modules some of whose kernels are others on GPUs that have instructions for FP8; names are the same."""

SELECTED = 4  # cases of each kernel that the published table is of


def cases(capability: int, modules: Sequence[str] = MODULES) -> dict[str, Case]:
    """The cases of `modules` for a target, by name, in the order of the list.

    ValueError where two have one name.
    """
    found: dict[str, Case] = {}
    for module in modules:
        for case in _listed(module, capability):
            if case.name in found:
                raise ValueError(f"{module}: two cases are called {case.name}")
            found[case.name] = case
    return found


def selected(found: Mapping[str, Case], each: int = SELECTED) -> list[str]:
    """Names of at most `each` cases of every kernel, spread over those that it has.

    fp16 is left out where a kernel has a case that is the same in bf16: it differs in no size.
    """
    by_kernel: dict[str, list[str]] = {}
    for name, case in found.items():
        if name.replace("fp16", "bf16") in found and "fp16" in name:
            continue
        by_kernel.setdefault(kernel_name(case), []).append(name)
    return [
        names[at * (len(names) - 1) // max(1, min(each, len(names)) - 1)]
        for names in by_kernel.values()
        for at in range(min(each, len(names)))
    ]


def of_kernels(found: Mapping[str, Case], kernels: Sequence[str], *, decode: bool) -> list[str]:
    """Names of all cases of some kernels (`kernel_name`), or of those that are in decode steps."""
    return [
        name for name, case in found.items() if kernel_name(case) in kernels and (case.decode or not decode)
    ]


def kernel_name(case: Case) -> str:
    """Module and function, as in "norms.rms_norm_kernel"."""
    function = case.kernel.fn
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def _listed(module: str, capability: int) -> Iterable[Case]:
    imported = importlib.import_module(module)
    listed: Iterable[Case] = imported.cases(capability) if module in BY_TARGET else imported.cases()
    return listed
