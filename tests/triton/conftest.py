"""Triton's kernels run in its interpreter here: on the CPU, in float32 and float16 only.

`triton.jit` decides when a kernel is declared, so the switch is set before any module with kernels is
imported. Nothing else in these tests' process declares kernels; processes that compile for a GPU are
started without it.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
