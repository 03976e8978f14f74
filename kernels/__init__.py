"""Device operations behind one table. `backend_for` is the only place that asks which device it is.

`kernels` is also the import name of a Hugging Face package; transformers probes for it. Importing
ours does nothing and sets no `__version__`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.ops import Ops

__all__ = ["Backend", "backend_for", "ops_for"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """Operations, and why these: a sentence such as "cpu-avx2 (this machine has avx2; ...)".

    `features` are the processor's that they were compiled for, as /proc/cpuinfo spells them.
    """

    ops: Ops
    reason: str
    features: frozenset[str] = frozenset()


def backend_for(device: torch.device) -> Backend:
    """The fastest operations for `device`. The first call on a machine compiles for some seconds.

    ValueError, one line, where a GPU's kernels could not run for want of their files.
    """
    from kernels.reference import ReferenceOps

    if device.type == "cuda":
        return _gpu_backend(device)
    if device.type != "cpu":
        return Backend(ReferenceOps(device), f"reference (there are no kernels for {device.type})")
    from kernels.cpu import BuildError, cpu_backend

    try:
        ops, reason, isa = cpu_backend()
    except BuildError as error:
        log.warning("CPU kernels cannot be built, running on the slow reference: %s", error)
        return Backend(ReferenceOps(device), f"reference, several times slower: {error}")
    return Backend(ops, reason, isa.needs)


def _gpu_backend(device: torch.device) -> Backend:
    from kernels.reference import ReferenceOps
    from kernels.triton.backend import check_files, described, gpu, refusal, triton_version

    name, capability = gpu(device)
    if why := refusal(device):
        log.warning("running on the slow reference, not on Triton kernels: %s: %s", name, why)
        return Backend(ReferenceOps(device), f"reference ({name}: {why})")
    from kernels.triton.ops import TritonOps

    check_files(name)
    return Backend(TritonOps(device), described(name, capability, str(triton_version())))


def ops_for(device: torch.device) -> Ops:
    """`backend_for(device).ops`."""
    return backend_for(device).ops
