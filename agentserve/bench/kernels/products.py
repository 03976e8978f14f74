"""The model's matrix products, each as a single operation, weights coming out of memory as in a step.

The gate_up matrix is packed plain here. A decoder that runs whole steps in one call fuses silu with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle

import torch

from agentserve.bench.kernels.cases import Case
from agentserve.bench.kernels.costs import Demand
from agentserve.bench.kernels.subject import Subject
from agentserve.bench.kernels.timing import Run, Stopwatch, each
from agentserve.bench.report import Row
from kernels.blocks import Matrix
from kernels.ops import Activations, Linear


def cases(
    name: str, subjects: Sequence[Subject], watch: Stopwatch, rows: Sequence[int], stream: int
) -> Iterator[Case]:
    """One of the model's matrices (`Subject.matrices`) at several numbers of rows, all subjects in turn.

    Each run goes over as many copies as make `stream` bytes: a matrix alone would stay in the caches.
    """
    products = [Product(subject, name, stream) for subject in subjects]
    out, width = products[0].matrices[0].shape
    for count in rows:
        title = f"{name} [{out} x {width}], {count} rows"
        yield Case("products", title, partial(_rows, products, watch, count, title))


class Product:
    """One of a subject's matrices, its copies prepared as its decoder would."""

    def __init__(self, subject: Subject, name: str, stream: int) -> None:
        self.subject = subject
        self.matrices = copies(subject.matrices()[name], stream)
        self.activations: list[Activations] = [
            "float" if name == "head" else subject.multiplied_in(matrix) for matrix in self.matrices
        ]
        self._linears = [
            subject.ops.linear(matrix, dtype=subject.dtype, activations=activations)
            for matrix, activations in zip(self.matrices, self.activations, strict=True)
        ]

    def run(self, x: torch.Tensor) -> Run:
        return each([_call(linear, x) for linear in self._linears])


def _rows(products: Sequence[Product], watch: Stopwatch, count: int, title: str) -> list[Row]:
    first = products[0]
    x = torch.randn(count, first.matrices[0].shape[1]).to(first.subject.dtype)
    times = watch.alternate({one.subject.name: one.run(x) for one in products})
    return [
        times[one.subject.name].row(
            "products", title, product_demand(one.matrices, one.activations, count), one.subject.name
        )
        for one in products
    ]


def copies(matrices: Sequence[Matrix], stream: int) -> list[Matrix]:
    """The layers' matrices, over and over, until they make `stream` bytes."""
    found: list[Matrix] = []
    total = 0
    for matrix in cycle(matrices):
        if found and total >= stream:
            break
        found.append(matrix)
        total += matrix.nbytes
    return found


def product_demand(matrices: Sequence[Matrix], activations: Sequence[Activations], rows: int) -> Demand:
    """Of one of `matrices` in the mean (formats may differ from layer to layer): weights read once, two
    operations per weight and row, in 8-bit integers where a matrix's `activations` are "int8"."""
    each_operations = 2 * matrices[0].numel() * rows
    operations, integers = each_operations * len(matrices), each_operations * activations.count("int8")
    nbytes = sum(matrix.nbytes for matrix in matrices)
    return Demand(
        nbytes // len(matrices), (operations - integers) // len(matrices), integers // len(matrices)
    )


def _call(linear: Linear, x: torch.Tensor) -> Run:
    return lambda: float(linear(x).shape[0])
