"""Device operations behind one table. `ops_for` is the only place that asks which device it is.

`kernels` is also the import name of a Hugging Face package; transformers probes for it. Importing
ours does nothing and sets no `__version__`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.ops import Ops

__all__ = ["ops_for"]

log = logging.getLogger(__name__)


def ops_for(device: torch.device) -> Ops:
    """The fastest operations for `device`. The first call on a machine compiles for some seconds."""
    from kernels.reference import ReferenceOps

    if device.type == "cpu":
        from kernels.cpu import BuildError, cpu_ops

        try:
            return cpu_ops()
        except BuildError as error:
            log.warning("CPU kernels cannot be built, running on the slow reference: %s", error)
    return ReferenceOps(device)
