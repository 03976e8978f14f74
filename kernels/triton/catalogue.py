"""Which modules hold kernels, and every case of theirs to compile ahead of time."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

from kernels.triton.launch import Case

MODULES: tuple[str, ...] = (
    "kernels.triton.norms",
    "kernels.triton.heads",
    "kernels.triton.pages",
)
"""Each has `cases() -> Iterable[Case]`."""


def cases(modules: Sequence[str] = MODULES) -> dict[str, Case]:
    """The cases of `modules` by name, in the order of the list. ValueError where two have one name."""
    found: dict[str, Case] = {}
    for module in modules:
        for case in _listed(module):
            if case.name in found:
                raise ValueError(f"{module}: two cases are called {case.name}")
            found[case.name] = case
    return found


def _listed(module: str) -> Iterable[Case]:
    listed: Iterable[Case] = importlib.import_module(module).cases()
    return listed
