"""Device operations behind one table. `ops_for` is the only place that asks which device it is.

`kernels` is also the import name of a Hugging Face package; transformers probes for it. Importing
ours does nothing and sets no `__version__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.ops import Ops

__all__ = ["ops_for"]


def ops_for(device: torch.device) -> Ops:
    """The operations to use on `device`."""
    from kernels.reference import ReferenceOps

    return ReferenceOps(device)
