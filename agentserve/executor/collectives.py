"""The ranks of a tensor-parallel group over `torch.distributed`: gloo between CPUs, NCCL between GPUs.

Sums are not left to the library: how it cuts what it reduces into pieces, and with it the order of additions,
depends on its size, so a row's bits would depend on how many rows come with it. The summands are gathered
and added up in the order of the ranks; each rank does the same additions and has the same bits. All goes as
bytes, which no library converts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST_WAIT = timedelta(minutes=30)
"""For the others within a step. Who hangs is found earlier and otherwise: the worker says nothing."""


class _Work(Protocol):
    def wait(self) -> object: ...


class Group(Protocol):
    """What is used of `torch.distributed`'s process groups, whose own types say less."""

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> _Work: ...

    def gather(self, outputs: Sequence[Tensor], own: Tensor, root: int) -> _Work: ...


class Collectives:
    """`agentserve.models.parallel.Ranks` over one process group. One thread uses it."""

    def __init__(self, group: Group, rank: int, degree: int) -> None:
        self._group = group
        self._rank = rank
        self._degree = degree

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def degree(self) -> int:
        return self._degree

    def summed(self, summand: Tensor) -> Tensor:
        parts = summand.new_empty((self._degree, *summand.shape))
        self._group.allgather([list(_bytes(parts).unbind(0))], [_bytes(summand.contiguous())]).wait()
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total = total + part
        return total.to(summand.dtype)

    def joined(self, columns: Tensor, width: int) -> Tensor:
        """Ranks' columns may be one more or fewer, and pieces must be alike: they are filled up."""
        rows, own = columns.shape
        most = -(-width // self._degree)
        piece = columns.contiguous() if own == most else torch.nn.functional.pad(columns, (0, most - own))
        if self._rank != 0:
            self._group.gather([], _bytes(piece), 0).wait()
            return columns
        parts = columns.new_empty((self._degree, rows, most))
        self._group.gather(list(_bytes(parts).unbind(0)), _bytes(piece), 0).wait()
        ends = [width * rank // self._degree for rank in range(self._degree + 1)]
        cut = [part[:, : end - first] for part, first, end in zip(parts, ends, ends[1:], strict=False)]
        return torch.cat(cut, dim=1)


def connect(meeting: Path, rank: int, degree: int, device: torch.device) -> Collectives:
    """Meet the other ranks; returns when all are there and have said a word to each other.

    `meeting`: a file in a directory that nobody else can enter, new for each group; it is not needed
    afterwards. CPU ranks are on this machine and talk over its loopback interface.
    """
    group = _gloo(meeting, rank, degree) if device.type == "cpu" else _nccl(meeting, rank, degree, device)
    ranks = Collectives(group, rank, degree)
    heard = ranks.summed(torch.ones((1, 1), device=device)).item()
    if heard != degree:
        raise RuntimeError(f"{degree} ranks answered as {heard:g}")
    return ranks


def _gloo(meeting: Path, rank: int, degree: int) -> Group:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = LONGEST_WAIT
    store = dist.FileStore(str(meeting), degree)  # type: ignore[attr-defined]
    return cast(Group, dist.ProcessGroupGloo(store, rank, degree, options))


def _nccl(meeting: Path, rank: int, degree: int, device: torch.device) -> Group:
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LONGEST_WAIT
    store = dist.FileStore(str(meeting), degree)  # type: ignore[attr-defined]
    return cast(Group, dist.ProcessGroupNCCL(store, rank, degree, options))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
