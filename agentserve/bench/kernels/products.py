"""The model's matrix products, weights coming out of memory as they do in a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

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
    used = {subject.name: copies(subject.matrices()[name], stream) for subject in subjects}
    prepared = {subject.name: prepare(subject, used[subject.name], name) for subject in subjects}
    out, width = used[subjects[0].name][0].shape
    found: list[Row] = []
    for count in rows:
        x = torch.randn(count, width).to(subjects[0].dtype)
        runs = {one.name: each([_call(linear, x) for linear in prepared[one.name]]) for one in subjects}
        times = watch.alternate(runs)
        for one in subjects:
            demand = product_demand(used[one.name], count, one.activations == "int8" and name != "head")
            title = f"{name} [{out} x {width}], {count} rows"
            found.append(times[one.name].row("products", title, demand, one.name))
    return found


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


def prepare(subject: Subject, matrices: Sequence[Matrix], name: str) -> list[Linear]:
    """Their products, as the decoder prepares them: 8-bit activations are for layers in blocks."""
    found = []
    for matrix in matrices:
        integers = name != "head" and isinstance(matrix, BlockMatrix)
        activations = subject.activations if integers else "float"
        found.append(subject.ops.linear(matrix, dtype=subject.dtype, activations=activations))
    return found


def product_demand(matrices: Sequence[Matrix], rows: int, int8: bool) -> Demand:
    """Of one of `matrices` in the mean (formats may differ from layer to layer): weights read once, two
    operations per weight and row."""
    operations = 2 * matrices[0].numel() * rows
    nbytes = sum(matrix.nbytes for matrix in matrices) // len(matrices)
    return Demand(nbytes, 0, operations) if int8 else Demand(nbytes, operations)


def _call(linear: Linear, x: torch.Tensor) -> Run:
    return lambda: float(linear(x).shape[0])
