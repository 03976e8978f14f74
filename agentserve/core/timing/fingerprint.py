"""Whose steps a cost model is of: everything that step times depend on, but for what is in a step."""

from __future__ import annotations

import msgspec


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two that are equal take equally long for equal steps."""

    model: str  # digest of the weights
    dtype: str
    weights: str  # formats that are kept as the file has them
    activations: str
    kv_dtype: str
    page_size: int
    kernels: str
    device: str
    threads: int
    machine: str  # the processor, and the accelerator if there is one

    def differences(self, other: Fingerprint) -> list[str]:
        """Each as "name: this, not that"."""
        return [
            f"{name}: {getattr(self, name)}, not {getattr(other, name)}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
