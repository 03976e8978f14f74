"""Operations whose rows have nothing to do with each other: beside the reference, and in all company."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentserve.bench.gpu.device import Device
from agentserve.bench.gpu.result import Check
from agentserve.bench.gpu.sizes import Sizes
from agentserve.bench.limits import DTYPE_NAMES
from agentserve.executor.draws import uniform
from agentserve.executor.filters import draw
from agentserve.types import Sampling
from kernels.blocks import FORMATS, BlockMatrix, BlockRows, Matrix, expand
from kernels.narrow import GroupedMatrix, NarrowMatrix, ScaledMatrix
from kernels.ops import Draw, Linear, Ops
from kernels.reference import ReferenceOps
from kernels.triton import sampling

CPU = torch.device("cpu")
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-16}
"""Of the largest number there: a few roundings of the dtype."""
BLOCKS = ("Q8_0", "Q4_0")  # formats that begin with a float16 scale
GROUP = 32  # inputs that share a scale of 4-bit weights
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class RowWise:
    """`run` on operands `[rows, ...]`, `oracle` on the same as float32 on the CPU: both to `[rows, ...]`."""

    name: str
    operands: tuple[Tensor, ...]
    run: Callable[..., Tensor]
    oracle: Callable[..., Tensor]


def checks(on: Device, sizes: Sizes, ops: Ops) -> Iterator[Check]:
    """Two for each operation and dtype."""
    for dtype in sizes.dtypes:
        for one in subjects(on, sizes, ops, dtype):
            name = f"{one.name} {DTYPE_NAMES[dtype]}"
            try:
                found = one.run(*(x.clone() for x in one.operands))
                expected = one.oracle(*(_plain(x) for x in one.operands))
                yield close(name, found, expected, dtype)
                yield invariant(name, one, found)
            except Exception as error:  # one kernel that fails must not hide the others
                yield Check(name, False, f"{type(error).__name__}: {error}"[:300])


def subjects(on: Device, sizes: Sizes, ops: Ops, dtype: torch.dtype) -> Iterator[RowWise]:
    """What is compared."""
    oracle, rows, hidden = ReferenceOps(CPU), sizes.rows, sizes.hidden
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(on.device)

    x, residual, weight = random(rows, hidden), random(rows, hidden), random(hidden)
    plain = _plain(weight)
    yield RowWise(
        "rms_norm", (x,),
        lambda x: ops.rms_norm(x, weight, EPS), lambda x: oracle.rms_norm(x, plain, EPS),
    )  # fmt: skip
    yield RowWise(
        "add_rms_norm", (x, residual),
        lambda x, y: torch.cat(ops.add_rms_norm(x, y, weight, EPS), -1),
        lambda x, y: torch.cat(oracle.add_rms_norm(x, y, plain, EPS), -1),
    )  # fmt: skip
    yield RowWise("silu_mul", (random(rows, 2 * sizes.inner),), ops.silu_mul, oracle.silu_mul)
    angles = torch.rand(rows, sizes.dim // 2, generator=generator).to(on.device) * 6
    yield RowWise(
        "rope", (random(rows, sizes.heads, sizes.dim), angles.cos(), angles.sin()), ops.rope, oracle.rope
    )
    matrix, bias = random(sizes.hidden, hidden), random(sizes.hidden)
    for given in (None, bias):
        linear = _prepared(ops, matrix, dtype, given)
        wide, added = _plain(matrix), 0.0 if given is None else _plain(given)
        name = "product" if given is None else "product with a bias"
        yield RowWise(name, (x,), linear, lambda x, wide=wide, added=added: x @ wide.T + added)
    for name, kept in matrices(sizes.hidden, hidden).items():
        wide = expand(kept, torch.float32)
        yield RowWise(
            f"product {name}", (x,),
            _prepared(ops, moved(kept, on.device), dtype), lambda x, wide=wide: x @ wide.T,
        )  # fmt: skip
    logits = torch.randn(rows, sizes.vocab, generator=generator).to(on.device)
    yield RowWise("greedy choice", (logits,), lambda x: sampling.best_of(x)[0], lambda x: x.argmax(-1))
    yield RowWise("drawn tokens", (logits, torch.arange(rows, device=on.device)), _drawn, _drawn_on_the_host)


def close(name: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> Check:
    """Whether it is the reference's, up to rounding; integers exactly."""
    found = found.cpu()
    if not found.is_floating_point():
        return Check(f"{name}: as the reference", torch.equal(found, expected))
    most = float(expected.abs().max())
    error = float((found.to(torch.float32) - expected).abs().max()) / most
    return Check(f"{name}: as the reference", error <= TOLERANCE[dtype], f"off by {error:.1e} of the largest")


def invariant(name: str, one: RowWise, found: Tensor) -> Check:
    """Whether rows have the same bits alone, in part, and in another order."""
    count = found.shape[0]
    generator = torch.Generator().manual_seed(3)
    orders = [
        torch.tensor([0]), torch.tensor([count - 1]), torch.arange(count // 2, count),
        torch.randperm(count, generator=generator), torch.arange(count).repeat(3),
    ]  # fmt: skip
    wrong = 0
    for order in orders:
        at = order.to(found.device)
        again = one.run(*(x[at].clone() for x in one.operands))
        wrong += int((again != found[at]).any())
    said = f"{wrong} of {len(orders)} orders differ" if wrong else ""
    return Check(f"{name}: the same bits in all company", not wrong, said)


def matrices(out: int, width: int) -> dict[str, BlockMatrix | NarrowMatrix]:
    """Weights of every kind that are no plain numbers: random codes, scales of 1/64."""
    generator = torch.Generator().manual_seed(5)

    def codes(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator)

    found: dict[str, BlockMatrix | NarrowMatrix] = {}
    for form in BLOCKS:
        kind = FORMATS[form]
        data = codes(256, out, width // kind.weights, kind.nbytes)
        data[:, :, :2] = torch.tensor([1 / 64], dtype=torch.float16).view(torch.uint8)
        found[form] = BlockMatrix((BlockRows(kind, data.view(out, -1)),), width)
    fp8 = codes(0x50, out, width) | codes(2, out, width) << 7  # up to 24, of either sign
    found["FP8"] = ScaledMatrix(fp8, torch.full((out, 1), 1 / 64), 1, width)
    scales = torch.full((width // GROUP, out), 1 / 64, dtype=torch.float16)
    found["INT4"] = GroupedMatrix(codes(256, out, width // 2), scales, codes(16, width // GROUP, out), GROUP)
    return found


def moved(matrix: BlockMatrix | NarrowMatrix, device: torch.device) -> BlockMatrix | NarrowMatrix:
    """The same matrix on a device."""
    if isinstance(matrix, BlockMatrix):
        runs = tuple(replace(run, data=run.data.to(device)) for run in matrix.runs)
        return replace(matrix, runs=runs)
    if isinstance(matrix, ScaledMatrix):
        return replace(matrix, codes=matrix.codes.to(device), scales=matrix.scales.to(device))
    return replace(
        matrix,
        codes=matrix.codes.to(device),
        scales=matrix.scales.to(device),
        zeros=matrix.zeros.to(device),
    )


def _prepared(ops: Ops, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None = None) -> Linear:
    """The product, prepared when it is first called: so that one that cannot be is a failure of its own."""
    made = functools.cache(lambda: ops.linear(matrix, bias, dtype=dtype))

    def product(x: Tensor) -> Tensor:
        return made()(x)

    return product


def _draw(row: int) -> Draw:
    """Every kind of draw, one after the other."""
    top_k, top_p, min_p = ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (100, 0.8, 0.05))[row % 4]
    return Draw(0.5 + row % 3 / 2, top_k, top_p, min_p, seed=row - 3, position=7 * row)


def _drawn(logits: Tensor, rows: Tensor) -> Tensor:
    return sampling.TritonDrawing()(logits, [_draw(row) for row in rows.tolist()])


def _drawn_on_the_host(logits: Tensor, rows: Tensor) -> Tensor:
    found = []
    for values, row in zip(logits.numpy(), rows.tolist(), strict=True):
        one = _draw(row)
        asked = Sampling(temperature=one.temperature, top_k=one.top_k, top_p=one.top_p, min_p=one.min_p)
        found.append(draw(values, asked, uniform(one.seed, one.position)))
    return torch.tensor(found)


def _plain(x: Tensor) -> Tensor:
    return x.cpu().to(torch.float32) if x.is_floating_point() else x.cpu()
