"""Tables of the rotary embedding, by the same float32 arithmetic as transformers'."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentserve.models.config import RopeConfig, RopeKind

_ROWS_AT_ONCE = 16_384  # bounds the float64 temporaries of a long table


def inverse_frequencies(config: RopeConfig, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """`[head_dim / 2]` float32 radians per position, divided by `factors` where given."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    wavelengths: Tensor = config.theta**exponents
    plain = 1.0 / wavelengths
    match config.kind:
        case RopeKind.DEFAULT:
            found = plain
        case RopeKind.LINEAR:
            found = plain / config.factor
        case RopeKind.LLAMA3:
            found = _llama3(config, plain)
        case RopeKind.YARN:
            found = _yarn(config, head_dim, wavelengths)
    return found if factors is None else found / factors.to(torch.float32)


def rope_table(
    config: RopeConfig, head_dim: int, positions: int, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, each `[positions, head_dim / 2]` float32, YaRN's attention factor included.

    Angles are float32 products, as transformers has them (at position 8,000 their rounding shows
    in the logits); their cosine is taken in float64, whose rounding does not depend on where in
    the table a position stands.
    """
    frequencies = inverse_frequencies(config, head_dim, factors)
    cos = torch.empty(positions, head_dim // 2, dtype=torch.float32)
    sin = torch.empty_like(cos)
    for start in range(0, positions, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, positions)
        angles = torch.arange(start, end).to(torch.float32)[:, None] * frequencies
        cos[start:end] = angles.double().cos()
        sin[start:end] = angles.double().sin()
    if config.attention_factor != 1.0:
        cos *= config.attention_factor
        sin *= config.attention_factor
    return cos, sin


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    trained = config.original_max_position
    wavelength = 2 * math.pi / plain
    blend = (trained / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    stretched = plain / config.factor
    blended = (1 - blend) * stretched + blend * plain
    is_long = wavelength > trained / config.low_freq_factor
    is_short = wavelength < trained / config.high_freq_factor
    return torch.where(is_long, stretched, torch.where(is_short, plain, blended))


def _yarn(config: RopeConfig, head_dim: int, wavelengths: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): a linear ramp over dimensions from kept to stretched frequencies."""

    def dimension(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width, 0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
