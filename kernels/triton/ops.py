"""`kernels.ops.Ops` in Triton's kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from kernels.blocks import Matrix
from kernels.ops import (
    KV_TAILS,
    Activations,
    Attention,
    AttentionShape,
    DecoderParts,
    Drawing,
    Linear,
    Span,
    StepDecoder,
)
from kernels.triton import heads, norms, pages, products, sampling
from kernels.triton.attention_plan import TritonAttention
from kernels.triton.decoder import TritonDecoder
from kernels.triton.recorder import GraphRecorder, Recorder
from kernels.triton.step_attention import StepAttention

_STEPS = (torch.bfloat16, torch.float16, torch.float32)


class TritonOps:
    """Every operation on `device`: a GPU, or the CPU where Triton's interpreter runs the kernels.

    recorder: what decode steps are recorded with; by default CUDA graphs on a GPU, and nothing elsewhere.
    """

    name = "triton"

    def __init__(self, device: torch.device, recorder: Callable[[], Recorder] | None = None) -> None:
        self._device = device
        self._checked: products.Checked = {}
        if recorder is None and device.type == "cuda":
            recorder = partial(GraphRecorder, device)
        self._recorder = recorder

    @property
    def numerics(self) -> str:
        """The sources hold tile sizes, the order of sums and what was tuned; Triton compiles them."""
        return (
            f"triton-1 {_machine(self._device)} triton-{triton.__version__} torch-{torch.__version__} "
            f"{products.numerics()} sources-{_sources()}"
        )

    def kv_dtypes(self, dtype: torch.dtype) -> frozenset[torch.dtype]:
        return frozenset(KV_TAILS) if dtype in _STEPS else frozenset()

    def linear(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activations: Activations = "float",
    ) -> Linear:
        return products.prepare(weight, bias, dtype, activations, checked=self._checked)

    def decoder(self, parts: DecoderParts) -> StepDecoder | None:
        return TritonDecoder(parts, self._checked, self._recorder)

    def drawing(self) -> Drawing | None:
        return sampling.TritonDrawing()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norms.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return heads.rope(x, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return norms.silu_mul(gate_up)

    def write_kv(self, kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        heads.write_kv(kv, slots, k, v)

    def attention(self, shape: AttentionShape, spans: Sequence[Span], tables: Tensor) -> Attention:
        return StepAttention(shape, spans, tables, partial(TritonAttention, device=self._device))

    def copy_page(self, storage: Tensor, source: int, target: int, slots: int) -> None:
        count, per_page = storage.shape[0], storage.shape[3]
        if not (0 <= source < count and 0 <= target < count and 0 <= slots <= per_page):
            raise ValueError(
                f"no copy of {slots} slots of page {source} to {target} among {count} of {per_page}"
            )
        pages.copy_page(storage, source, target, slots)


def _machine(device: torch.device) -> str:
    """The kind of device: another one may add up in another order."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device).replace(' ', '-')} sm_{major}{minor}"


@cache
def _sources() -> str:
    """A digest of everything that kernels are made of."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.json") for path in folder.rglob(kind)):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(text)} ".encode() + text)
    return digest.hexdigest()[:32]
