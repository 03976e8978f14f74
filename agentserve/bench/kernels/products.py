"""The model's matrix products, weights coming out of memory as they do in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentserve.bench.kernels.costs import Demand
from agentserve.bench.kernels.subject import Subject
from agentserve.bench.kernels.timing import Run, Stopwatch, each
from agentserve.bench.report import Row
from kernels.blocks import BlockMatrix, Matrix
from kernels.ops import Linear


def measure(
    name: str, subjects: Sequence[Subject], watch: Stopwatch, rows: Sequence[int], stream: int
) -> list[Row]:
    """One of the model's matrices (`Subject.matrices`) at several numbers of rows, all subjects in turn.

    Each run goes over as many copies as make `stream` bytes: a matrix alone would stay in the caches.
    """
    layers = {subject.name: subject.matrices()[name] for subject in subjects}
    prepared = {subject.name: prepare(subject, layers[subject.name], name, stream) for subject in subjects}
    found: list[Row] = []
    for count in rows:
        runs: dict[str, Run] = {}
        for subject in subjects:
            x = torch.randn(count, layers[subject.name][0].shape[1]).to(subject.dtype)
            runs[subject.name] = each([_call(linear, x) for linear in prepared[subject.name]])
        times = watch.alternate(runs)
        for subject in subjects:
            matrix = layers[subject.name][0]
            out, width = matrix.shape
            title = f"{name} [{out} x {width}], {count} rows"
            demand = product_demand(matrix, count, subject.activations == "int8" and name != "head")
            found.append(times[subject.name].row("products", title, demand, subject.name))
    return found


def prepare(subject: Subject, matrices: Sequence[Matrix], name: str, stream: int) -> list[Linear]:
    """Enough of the layers' products, over and over, to run through `stream` bytes of weights."""
    copies = max(1, -(-stream // matrices[0].nbytes))
    found = []
    for number in range(copies):
        matrix = matrices[number % len(matrices)]
        integers = name != "head" and isinstance(matrix, BlockMatrix)
        activations = subject.activations if integers else "float"
        found.append(subject.ops.linear(matrix, dtype=subject.dtype, activations=activations))
    return found


def product_demand(matrix: Matrix, rows: int, int8: bool) -> Demand:
    """Weights read once, two operations per weight and row."""
    operations = 2 * matrix.numel() * rows
    return Demand(matrix.nbytes, 0, operations) if int8 else Demand(matrix.nbytes, operations)


def _call(linear: Linear, x: torch.Tensor) -> Run:
    return lambda: float(linear(x).shape[0])
