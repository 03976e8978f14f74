"""Counter-based random numbers: the draw at a position depends on (seed, position) alone.

There is no state to carry, so a recomputed, preempted or migrated turn draws the same numbers.
The generator is Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), written out over Python's integers so that every platform agrees bit for bit.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One Philox4x64-10 block: four 64-bit words from a 256-bit counter and a 128-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = _MULTIPLIERS[0] * c0
        right = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & _MASK, (left >> 64) ^ c3 ^ k1, left & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A float in [0, 1) with 53 random bits.

    `seed` may be any integer (its low 128 bits, two's complement, are the key); `position` is the
    position in the session of the token to be drawn, at least 0.
    """
    if position < 0:
        raise ValueError(f"a position cannot be negative: {position}")
    key = (seed & _MASK, (seed >> 64) & _MASK)
    word = philox4x64((position & _MASK, position >> 64, 0, 0), key)[0]
    return (word >> 11) * 2.0**-53
