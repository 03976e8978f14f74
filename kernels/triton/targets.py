"""The GPUs that kernels are compiled for, and how many blocks of a kernel one of their processors holds.

Figures: NVIDIA's CUDA programming guide, technical specifications by compute capability; how registers are
given out: NVIDIA's occupancy calculator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1024
MOST_REGISTERS = 255  # of one thread; what it needs beyond is spilled
_REGISTERS = 65_536  # of 32 bits, of one processor (SM)
_WARPS = 64
_BLOCKS = 32
_THREADS = 32  # of a warp
_REGISTER_UNIT = 256  # registers are given to warps in such pieces
_PARTITIONS = 4  # of a processor, each with as many of its warps
_RESERVED = KIB  # shared memory that the system takes of each block
_TENSOR_COLUMNS = 512  # tensor memory of one processor, from capability 10.0 on


@dataclass(frozen=True, slots=True)
class Target:
    """A compute capability: 80 is 8.0. Shared memory in bytes, `block_shared` for one block at most."""

    capability: int
    gpus: str
    block_shared: int
    shared: int

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"


TARGETS: Mapping[int, Target] = {
    80: Target(80, "A100", 163 * KIB, 164 * KIB),
    90: Target(90, "H100, H200", 227 * KIB, 228 * KIB),
    100: Target(100, "B200", 227 * KIB, 228 * KIB),
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks of a kernel that one processor holds at once, their warps, and what bounds them."""

    blocks: int
    warps: int
    bound: str


def occupancy(target: Target, warps: int, registers: int, shared: int, columns: int = 0) -> Occupancy:
    """`warps` of a block, `registers` of a thread, `shared` bytes and tensor memory `columns` of a block.

    No blocks where one alone is too large.
    """
    per_warp = -(-registers * _THREADS // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // max(per_warp, 1) // _PARTITIONS * _PARTITIONS // warps
    fits = shared <= target.block_shared
    bounds = {
        "warps": _WARPS // warps,
        "blocks": _BLOCKS,
        "registers": by_registers if registers <= MOST_REGISTERS else 0,
        "shared memory": target.shared // (shared + _RESERVED) if fits else 0,
        "tensor memory": _TENSOR_COLUMNS // columns if columns else _BLOCKS,
    }
    bound = min(bounds, key=lambda name: bounds[name])
    return Occupancy(bounds[bound], bounds[bound] * warps, bound)
