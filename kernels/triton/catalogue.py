"""Which modules hold kernels, and every case of theirs to compile ahead of time."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

from kernels.triton.launch import Case

MODULES: tuple[str, ...] = (
    "kernels.triton.norms",
    "kernels.triton.heads",
    "kernels.triton.pages",
    "kernels.triton.plain_products",
    "kernels.triton.block_products",
    "kernels.triton.embedding",
    "kernels.triton.narrow",
    "kernels.triton.sampling",
)
"""Each has `cases() -> Iterable[Case]`, those of `BY_TARGET` `cases(capability)`."""

BY_TARGET = frozenset({"kernels.triton.narrow"})
"""Modules some of whose kernels are others on GPUs that have instructions for FP8; names are the same."""


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


def _listed(module: str, capability: int) -> Iterable[Case]:
    imported = importlib.import_module(module)
    listed: Iterable[Case] = imported.cases(capability) if module in BY_TARGET else imported.cases()
    return listed
