"""What the core is told once, at start."""

from __future__ import annotations

import msgspec

from agentserve.core.scheduling.settings import SchedulingConfig


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and laws of one engine core. Four limits hold at once in every step:

    seats (`max_num_seqs`), tokens (`max_batched_tokens`), pages (`page_reserve`), and time
    (`max_step_seconds` against the predicted duration).
    """

    page_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_batched_tokens: int = 1024
    page_reserve: float = 0.01  # share of the pool that admissions leave free while others run
    max_step_seconds: float | None = None  # None: steps are not limited by predicted time
    full_input_gate: bool = True  # admit only if the whole uncomputed input fits
    prefix_cache: bool = True
    scheduling: SchedulingConfig = SchedulingConfig()
    eos_token_ids: tuple[int, ...] = ()
    namespace: bytes = b""  # digest of weights, dtype, RoPE, ... (tiering.keys.namespace_digest)

    def __post_init__(self) -> None:
        for name in ("page_size", "max_model_len", "max_num_seqs", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_batched_tokens < self.page_size:
            raise ValueError(
                f"max_batched_tokens: expected at least one page ({self.page_size}), "
                f"got {self.max_batched_tokens}"
            )
        if not 0 <= self.page_reserve < 1:
            raise ValueError(f"page_reserve: expected a share in [0, 1), got {self.page_reserve}")
