"""Runs of bytes, as the stores hand them on without copying."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""A contiguous run of bytes, `[n]`."""
